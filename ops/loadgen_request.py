"""One streamed request of the load generator, and what its user saw.

Times are seconds of one monotonic clock. The first token is the first chunk with text; the end is the last chunk with
text; what fails is a sample with an error, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from ops.event_stream import chunks_of, message_of
from shared.errors import ServiceDown


@dataclass(frozen=True)
class Prompt:
    domain: str
    messages: Sequence[dict[str, str]]

    @property
    def text(self) -> str:
        """For the completions endpoint, which knows no roles."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class Form:
    """What all requests have in common."""

    chat: bool
    model: str
    max_tokens: int
    temperature: float
    metadata: bool = True  # say the domain in the request's metadata
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self.model,
            **({"messages": list(prompt.messages)} if self.chat else {"prompt": prompt.text}),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"metadata": {"domain": prompt.domain}} if self.metadata else {}),
            **dict(self.extra),
        }


@dataclass(frozen=True)
class Sample:
    """One request. `tokens` are the server's count, or the chunks with text where it gives none."""

    number: int  # in the order of sending
    domain: str
    due_at: float  # when it should have been sent
    sent_at: float
    first_at: float = 0.0  # 0: no text came
    last_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    counted: bool = False  # by the server
    gaps: tuple[float, ...] = ()  # between chunks with text
    accepted: int = 0  # of drafts, where the server says so
    tested: int = 0
    drafted: int = 0
    rounds: int = 0  # speculation rounds
    version: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first_at - self.sent_at

    @property
    def latency(self) -> float:
        return self.last_at - self.sent_at

    @property
    def itl(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        return (self.last_at - self.first_at) / (self.tokens - 1) if self.tokens > 1 else None


async def send(client: httpx.AsyncClient, form: Form, prompt: Prompt, number: int, due_at: float) -> Sample:
    """Sends it now and reads the answer to its end."""
    reading = _Reading()
    sent_at, error = time.perf_counter(), ""
    try:
        async with client.stream("POST", form.path, json=form.body(prompt)) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode("utf-8", "replace")
                raise ServiceDown(f"HTTP {reply.status_code}: {message_of(text)}")
            async for chunk in chunks_of(reply):
                reading.take(chunk, time.perf_counter())
        if not reading.times:
            error = "the answer has no text"
    except (httpx.HTTPError, ServiceDown, ValueError, LookupError, TypeError, AttributeError) as failure:
        error = str(failure) or type(failure).__name__
    return reading.sample(number, prompt.domain, due_at, sent_at, error)


class _Reading:
    def __init__(self) -> None:
        self.times: list[float] = []  # of chunks with text
        self._usage: dict[str, Any] = {}
        self._speculative: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any], now: float) -> None:
        if any(_text_of(choice) for choice in chunk.get("choices") or ()):
            self.times.append(now)
        self._usage = chunk.get("usage") or self._usage
        self._speculative = (chunk.get("metrics") or {}).get("speculative_decoding") or self._speculative

    def sample(self, number: int, domain: str, due_at: float, sent_at: float, error: str) -> Sample:
        times, usage, speculative = self.times, self._usage, self._speculative
        tokens = usage.get("completion_tokens")
        return Sample(
            number=number,
            domain=domain,
            due_at=due_at,
            sent_at=sent_at,
            first_at=times[0] if times else 0.0,
            last_at=times[-1] if times else 0.0,
            ended_at=time.perf_counter(),
            tokens=len(times) if tokens is None else int(tokens),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            chunks=len(times),
            counted=tokens is not None,
            gaps=tuple(later - earlier for earlier, later in pairwise(times)),
            accepted=int(speculative.get("num_accepted_draft_tokens") or 0),
            tested=int(speculative.get("tested") or 0),
            drafted=int(speculative.get("num_draft_tokens") or 0),
            rounds=int(speculative.get("num_spec_steps") or 0),
            version=str(speculative.get("drafter_version") or ""),
            error=error,
        )


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or "")
