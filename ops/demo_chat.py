"""One chat request of the demo over HTTP, streamed, as any client of the API would send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from ops.demo_plan import Prompt
from ops.event_stream import chunks_of, message_of
from shared.errors import RedraftError, ServiceDown


@dataclass(frozen=True)
class Answer:
    """One request as its user saw it. Times are seconds since the epoch."""

    domain: str
    sent_at: float
    first_at: float  # first text; 0: none came
    finished_at: float
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Asking:
    """What every request has in common."""

    model: str
    max_tokens: int
    temperature: float

    def body(self, prompt: Prompt) -> dict[str, object]:
        return {
            "model": self.model,
            "messages": list(prompt.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {"domain": prompt.domain},
        }


async def ask(client: httpx.AsyncClient, asking: Asking, prompt: Prompt) -> Answer:
    """Reads the answer to its end. What fails is an Answer with an error, not an exception."""
    sent_at, reading, error = time.time(), _Reading(), ""
    try:
        await _stream(client, asking.body(prompt), reading)
    except (httpx.HTTPError, RedraftError, ValueError) as failure:
        error = str(failure) or type(failure).__name__
    return Answer(prompt.domain, sent_at, reading.first_at, time.time(), reading.tokens, error)


def served_model(api: str, get: Callable[..., httpx.Response] = httpx.get) -> str:
    """The name that requests must carry. Raises ServiceDown."""
    try:
        return str(get(f"{api}/v1/models", timeout=10, trust_env=False).raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ServiceDown(f"{api}/v1/models gave no model ({error})") from error


@dataclass
class _Reading:
    first_at: float = 0.0
    tokens: int = 0


async def _stream(client: httpx.AsyncClient, body: dict[str, object], reading: _Reading) -> None:
    """A refusal for now (429, 503) is not a failure: the same request goes out again when the server said so."""
    while True:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code in (429, 503):
                wait_s = float(reply.headers.get("retry-after", "1"))
            elif reply.status_code != 200:
                text = (await reply.aread()).decode("utf-8", "replace")
                raise ServiceDown(f"HTTP {reply.status_code}: {message_of(text)}")
            else:
                await _read(reply, reading)
                return
        await asyncio.sleep(wait_s)


async def _read(reply: httpx.Response, reading: _Reading) -> None:
    async for chunk in chunks_of(reply):
        if not reading.first_at and any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
            reading.first_at = time.time()
        if chunk.get("usage"):
            reading.tokens = chunk["usage"]["completion_tokens"]
