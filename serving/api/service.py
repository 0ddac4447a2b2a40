"""What the HTTP side knows of the replica behind it: whether it serves, and the little it needs to serve.

Owns the replica's state as clients see it (loading, ready, draining, failed). `Backend` is fixed once loaded; what
changes while serving is read from the decoder's snapshot. It knows nothing of HTTP, Ray or torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from serving.api.domains import Domains
from serving.api.logprobs import TokenTexts
from serving.engine.events import Event
from serving.engine.request import GenerationRequest
from shared.errors import NotReady, RequestError

State = Literal["loading", "ready", "draining", "failed"]


class Snapshot(Protocol):
    """The decoder at one moment; counts of requests and of KV blocks."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def drafter_version(self) -> str: ...
    @property
    def draining(self) -> bool: ...


class Decoder(Protocol):
    """The part of the engine loop that the API calls, from one asyncio loop but for `check`."""

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, Overloaded or NotReady if `generate` would refuse. Safe in any thread."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Deltas, then exactly one Ending. Closing it early cancels the request."""

    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Backend:
    """A loaded replica."""

    decoder: Decoder
    tokenizer: Any
    name: str  # what clients put in `model`
    fingerprint: str  # of the target, weight format included
    context: int  # positions that prompt and output of one request may take together
    token_count: int  # ids from here on are not tokens
    most_prompts: int  # answers that one request may ask for: more could never be queued together
    numerics: str = ""  # what else decides a seeded answer (`serving.engine.numerics`)
    domains: Domains = field(default_factory=lambda: Domains(32))
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    @property
    def system_fingerprint(self) -> str:
        """The same exactly as long as a seeded request gets the same answer: weights, their format, numerics."""
        return "fp_" + hashlib.sha256(f"{self.fingerprint}|{self.numerics}".encode()).hexdigest()[:10]

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def require_model(self, model: str) -> None:
        """Raises RequestError unless `model` is the one served."""
        if model != self.name:
            raise RequestError(
                f"The model '{model}' does not exist here. This service serves '{self.name}'.",
                param="model",
                code="model_not_found",
            )


class Service:
    """State of one replica. `open`, `fail` and `drain` may be called from any thread."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self._state: State = "loading"
        self._backend: Backend | None = None
        self._failure = ""

    def open(self, backend: Backend) -> None:
        self._backend = backend
        if self._state == "loading":
            self._state = "ready"

    def fail(self, message: str) -> None:
        """Loading came to nothing, or the decoder died; it will not serve again."""
        self._failure, self._state = message, "failed"

    def drain(self) -> None:
        """Take no new requests; those accepted go on."""
        if self._state != "failed":
            self._state = "draining"

    @property
    def state(self) -> State:
        if self._state == "ready" and self._backend is not None and self._backend.decoder.snapshot().draining:
            return "draining"
        return self._state

    def backend(self) -> Backend:
        """Raises NotReady unless requests can be served now."""
        state = self.state
        if state == "ready" and self._backend is not None:
            return self._backend
        if state == "failed":
            raise NotReady(f"This replica failed: {self._failure}")
        what = "is still loading its model" if state == "loading" else "is draining and takes no new requests"
        raise NotReady(f"This replica {what}. Try again in a moment.")

    def readiness(self) -> dict[str, Any]:
        """The body of /readyz."""
        state = self.state
        body: dict[str, Any] = {"status": state, "replica": self.replica_id}
        if state == "failed":
            body["message"] = self._failure
        if self._backend is not None:
            now = self._backend.decoder.snapshot()
            body |= {
                "model": self._backend.name,
                "target": self._backend.fingerprint,
                "drafter_version": now.drafter_version,
                "running": now.running,
                "waiting": now.waiting,
                "blocks": {"free": now.blocks_free, "total": now.blocks_total},
            }
        return body
