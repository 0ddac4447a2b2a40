"""Any OpenAI-compatible server as a contender, asked over HTTP with streamed chat completions.

Its model is whatever its own /v1/models names first; its threads, weights and caches are those it was started with.
Making text and HTTP is part of what is timed, as it is of what a user gets.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from ops.bench_line_up import Contender
from ops.bench_measure import Clock, Decode, Measure, Messages, times_of
from shared.config import Config
from shared.errors import ConfigError, RedraftError

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_VERSIONS = ("/version", "/props")  # of vLLM; of llama-server


class Server:
    """One server at one base URL (the part before /v1)."""

    def __init__(self, contender: Contender, config: Config, job: Mapping[str, Any]) -> None:
        self._url = contender.url.rstrip("/").removesuffix("/v1")
        self._options = {"temperature": float(job["temperature"])}
        if job["ignore_eos"]:
            self._options["ignore_eos"] = True  # not of OpenAI, but vLLM and llama-server know it
        self._model = self._first_model()
        self.facts = {
            "drafter": "its own",
            "weights": "its own",
            "weight_bytes": 0,
            "threads": 0,
            "model": self._model,
            "version": self._version(),
        }

    def run(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> Measure:
        """All at once."""
        return asyncio.run(self._together(conversations, max_tokens))

    def stop(self) -> None:
        """The server is not ours to stop."""

    async def _together(self, conversations: Sequence[Messages], max_tokens: int) -> Measure:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT, limits=limits, trust_env=False) as client:
            began = time.perf_counter()
            clocks = [Clock() for _ in conversations]
            counts = await asyncio.gather(
                *(
                    self._ask(client, messages, max_tokens, clock, began)
                    for messages, clock in zip(conversations, clocks, strict=True)
                )
            )
            seconds = time.perf_counter() - began
        for clock, count in zip(clocks, counts, strict=True):
            clock.tokens = count  # text is not delivered token by token: the server's own count is right
        times = times_of(clocks)
        first = max(times.ttft_s, default=0.0)
        decode = Decode(tokens=sum(counts) - len(counts), seconds=max(seconds - first, 0.0))
        return Measure(seconds, sum(counts), times, decode=decode)

    async def _ask(
        self, client: httpx.AsyncClient, messages: Messages, max_tokens: int, clock: Clock, began: float
    ) -> int:
        """Tokens of the answer, as the server counts them."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        count = 0
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")[:500]
                    raise RedraftError(f"{self._url} answered {response.status_code}: {said}")
                async for event in _events(response):
                    if "error" in event:
                        raise RedraftError(f"{self._url} broke off: {event['error']}")
                    if any(choice["delta"].get("content") for choice in event.get("choices") or ()):
                        clock.deliver(time.perf_counter() - began)
                    if event.get("usage"):
                        count = int(event["usage"]["completion_tokens"])
        except httpx.HTTPError as error:
            raise RedraftError(f"{self._url} was lost ({type(error).__name__}: {error})") from error
        if not count:
            raise RedraftError(f"{self._url} does not count its tokens (stream_options.include_usage)")
        return count

    def _first_model(self) -> str:
        try:
            answer = httpx.get(f"{self._url}/v1/models", timeout=5.0, trust_env=False)
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            remedy = "Start the server, and name it as NAME=http://HOST:PORT."
            raise ConfigError("--against", f"{self._url}/v1/models names no model ({error})", remedy) from error

    def _version(self) -> str:
        for path in _VERSIONS:
            try:
                found = httpx.get(self._url + path, timeout=5.0, trust_env=False).raise_for_status().json()
                return str(found.get("version") or found.get("build_info") or "")
            except (httpx.HTTPError, ValueError, AttributeError):
                continue
        return ""


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
