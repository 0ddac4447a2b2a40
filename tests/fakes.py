"""Stand-ins for parts that a test does not want: the engine loop, with a script instead of a model, and its replica."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from serving.engine.events import Delta, Ending, Event, FailureCode, RequestStats, TokenLogprob
from serving.engine.request import GenerationRequest
from shared.config import Config
from shared.errors import ConfigError, Overloaded, RequestError
from tests.tiny import build_tiny_tokenizer

SCRIPT = "Sure, here it is: α rises when the drafter has read what you write."
# Two speculation steps and one plain step: drafted 4 and 2, accepted 3 and 0, tested 4 (3 kept, 1 refused) and 1.
STATS = RequestStats(
    num_steps=3,
    num_spec_steps=2,
    num_draft_tokens=6,
    num_accepted_draft_tokens=3,
    tested=5,
    accepted_lengths=(1, 0, 0, 1),
    by_draft_length={2: (1, 0, 0), 4: (0, 0, 0, 1, 0)},
    num_spec_tokens=4,
    drafter_version="v7",
)
# What a replica has counted, in every field that it may have.
COUNTERS = {
    "steps|domain=sql": 10.0,
    "emitted|domain=sql": 25.0,
    "spec_steps|domain=sql|version=base": 4.0,
    "spec_steps|domain=sql|version=v1": 4.0,
    "drafted|domain=sql|version=base": 12.0,
    "drafted|domain=sql|version=v1": 16.0,
    "tested|domain=sql|version=base": 8.0,
    "tested|domain=sql|version=v1": 10.0,
    "accepted|domain=sql|version=base": 6.0,
    "accepted|domain=sql|version=v1": 9.0,
    "tested_at.1": 8.0,
    "accepted_at.1": 7.0,
    "tested_at.2": 7.0,
    "accepted_at.2": 5.0,
    "gamma_at.0": 2.0,
    "gamma_at.3": 4.0,
    "gamma_at.4": 4.0,
    "schedule_s": 0.125,
    "draft_s": 0.5,
    "verify_s": 2.0,
    "sample_s": 0.25,
    "requests_finished": 3.0,
    "requests_cancelled": 2.0,
    "requests_failed": 1.0,
    "traces_published": 4.0,
    "traces_dropped": 1.0,
    "traces_withheld": 5.0,
    "redacted_cut": 3.0,
    "redacted_whole": 1.0,
    "redaction_failed": 1.0,
    "redaction_dropped": 1.0,
    "features_dropped": 2.0,
    "swaps": 1.0,
    "swap_pause_le.0.005": 1.0,
    "swap_pause_s": 0.004,
    "swaps_refused.base": 1.0,
    "first_token_le.0.25": 3.0,
    "first_token_s": 0.5,
    "token_le.0.02": 20.0,
    "token_le.inf": 2.0,
    "token_s": 6.5,
}
TOKEN_S = 0.3  # that a fake replica takes for a token: long beside the way through Serve
STAY_S = 600.0  # that no test waits for


@dataclass(frozen=True)
class FakeSnapshot:
    running: int = 0
    waiting: int = 0
    blocks_free: int = 60
    blocks_total: int = 64
    drafter_version: str = "v7"
    draining: bool = False


def fake_logprobs(ids: tuple[int, ...], wanted: int | None, penalty: int = 1) -> tuple[TokenLogprob, ...]:
    """Every token has -penalty / 4 and the likeliest others are the next ids, less by 1 each."""
    if wanted is None:
        return ()
    return tuple(
        TokenLogprob(id, -penalty / 4, tuple((id + place, -penalty / 4 - place) for place in range(wanted)))
        for id in ids
    )


@dataclass
class FakeLoop:
    """Says `script` to every request, one word a token, and keeps account of what became of each request."""

    script: str = SCRIPT
    context: int = 256
    max_queue: int = 8
    token_s: float = 0.0
    fail_after: int | None = None  # tokens before the request fails
    fail_code: FailureCode = "internal_error"
    cancel_after: int | None = None  # tokens before the engine gives the request up, as at a shutdown
    deadline_after: int | None = None  # tokens before the request's own time is up
    break_after: int | None = None  # tokens before a defect of the engine shows as an exception
    draining: bool = False
    alive: bool = True
    seen: list[GenerationRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def check(self, request: GenerationRequest) -> None:
        wanted = len(request.prompt_ids) + request.params.max_tokens
        if wanted > self.context:
            raise RequestError(
                f"{len(request.prompt_ids)} prompt tokens and max_tokens {request.params.max_tokens} exceed "
                f"the context of {self.context}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if len(self.running) >= self.max_queue:
            raise Overloaded("The queue is full. Try again later.", retry_after_s=3)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.check(request)  # others may have come between the caller's check and this
        self.seen.append(request)
        self.running.add(request.id)
        ended, penalty = False, 1 + len(self.seen) % 3  # the third request is the likeliest
        try:
            words = self.script.split(" ")
            pieces = [words[0], *(f" {word}" for word in words[1:])]
            said = 0
            faults = (
                (self.fail_after, "failed"),
                (self.cancel_after, "cancelled"),
                (self.deadline_after, "deadline"),
            )
            for piece in pieces[: request.params.max_tokens]:
                for limit, reason in faults:
                    if limit == said:
                        ended = True
                        yield self._ending(request, reason, said, message=f"{reason} on purpose")
                        return
                if self.break_after == said:
                    raise ZeroDivisionError("a defect")
                await asyncio.sleep(self.token_s)
                said += 1
                yield Delta(piece, (said,), fake_logprobs((said,), request.params.logprobs, penalty))
            yield self._ending(request, "stop" if said == len(pieces) else "length", said)
            ended = True
            self.finished.append(request.id)
        finally:
            self.running.discard(request.id)
            if not ended:
                self.cancelled.append(request.id)

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(running=len(self.running), draining=self.draining)

    def _ending(self, request: GenerationRequest, reason: str, said: int, message: str = "") -> Ending:
        stats = STATS if request.params.speculative else RequestStats(num_steps=said, num_spec_tokens=4)
        wanted = request.params.prompt_logprobs
        of_prompt = (None, *fake_logprobs(request.prompt_ids[1:], wanted)) if wanted is not None else ()
        code = self.fail_code if reason == "failed" else None
        return Ending(reason, len(request.prompt_ids), said, stats, message, None, of_prompt, code)  # type: ignore[arg-type]


@dataclass
class FakeReplica:
    """What `serving.app` expects of a replica, around a fake loop."""

    loop: FakeLoop
    loaded: Any
    context: int
    stopped: bool = False
    numerics: str = "fake"

    def counters(self) -> dict[str, float]:
        return dict(COUNTERS)

    def status(self) -> dict[str, Any]:
        return {**vars(self.loop.snapshot()), "trace_queue": 3}

    def stop(self) -> None:
        self.stopped = True


class ObedientLoop(FakeLoop):
    """A fake loop in another process, led by a request's domain: `exit` is a crash, `stay` does not end by itself."""

    def check(self, request: GenerationRequest) -> None:
        if request.domain != "stay":
            super().check(request)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        if request.domain == "exit":
            os._exit(1)
        if request.domain == "stay":
            self.running.add(request.id)
            try:
                await asyncio.sleep(STAY_S)
            finally:
                self.running.discard(request.id)
        async for event in super().generate(request):
            yield event


def load_fake_replica(config: Config, replica_id: str, features: object) -> FakeReplica:
    """To be given to `serving.app.deploy`. `target.model` says how it goes: fake, wrong, or gated (by a file `go`)."""
    if config.target.model == "wrong":
        raise ConfigError("target.model", "there is no such model", "Name one that exists")
    while config.target.model == "gated" and not (config.home_path / "go").exists():
        time.sleep(0.05)
    script = f"{os.environ['OMP_NUM_THREADS']} threads, {os.environ['OMP_WAIT_POLICY']} waiting"
    tokenizer = build_tiny_tokenizer(320)
    loaded = SimpleNamespace(tokenizer=tokenizer, name="tiny", fingerprint="ab12:fp16", token_count=len(tokenizer))
    room = config.engine.max_batch + config.engine.max_queue
    loop = ObedientLoop(script, context=512, max_queue=room, token_s=TOKEN_S)
    return FakeReplica(loop, loaded, loop.context)
