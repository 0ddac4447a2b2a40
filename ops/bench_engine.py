"""Our own engine as a contender: what a replica is assembled from, stepped in this thread without HTTP or Ray.

The KV cache is sized for the run and nothing is kept from one call to the next, since repeats of a prompt would
otherwise be answered from the prefix cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import Tensor

from ops.bench_arrivals import feed_at
from ops.bench_line_up import Contender
from ops.bench_measure import Measure, Messages
from ops.bench_steps import StepWatch
from ops.bench_weights import linear_bytes
from serving.assembly import assemble
from serving.batch import Answer, BatchRunner
from serving.drafters.load import Swap
from serving.engine.detokenize import Detokenizer
from serving.engine.engine import Engine, Tracing
from serving.engine.request import GenerationParams, GenerationRequest
from serving.privacy import Privacy
from serving.publisher import TracePublisher
from shared.config import Config
from shared.errors import RedraftError
from shared.store import Store
from shared.trace import Sampling

Between = Callable[[Engine], None]
_DRAIN_S = 10.0
_SWAP_ROUNDS = 16  # at most so many calls while a swap is prepared


class OwnEngine:
    """One target, one drafter, one gamma rule."""

    def __init__(self, contender: Contender, config: Config, job: Mapping[str, Any]) -> None:
        """`job`: temperature, ignore_eos, conversations (all that will come), batch (the largest), max_tokens."""
        self._temperature, self._ignore_eos = float(job["temperature"]), bool(job["ignore_eos"])
        self._ids: dict[str, tuple[int, ...]] = {}
        longest = self._longest(config, job)
        blocks = int(job["batch"]) * (-(-longest // config.engine.block_size) + 1)
        engine = replace(config.engine, kv_tokens=blocks * config.engine.block_size, max_batch=int(job["batch"]))
        parts = assemble(replace(config, engine=engine))
        self._loaded, self._slot = parts.loaded, parts.slot
        self._store = Store(contender.redis, "bench") if contender.redis else None
        self._publisher = self._outbox(config, self._store) if self._store is not None else None
        self._offered = 0
        tracing = self._tracing(config) if self._publisher is not None else None
        self._runner = BatchRunner(parts.paged, parts.drafter, parts.controller, parts.limits, tracing)
        self._calls = 0
        self.facts = {
            "drafter": self._slot.kind if self._slot is not None else "none",
            "weights": self._loaded.weights,
            "weight_bytes": linear_bytes(self._loaded.model.config, self._loaded.weights),
            "threads": _torch_threads(),
        }

    def run(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> Measure:
        """All at once, each in a place of the batch."""
        requests = self._requests(conversations, domain, max_tokens)
        watch = StepWatch(self._engine)

        def feed() -> Iterator[GenerationRequest]:
            for request in requests:
                watch.arrived(request.id)
                yield request

        answers = self._answers(self._runner.run(feed(), between=watch.step), watch)
        self._drain()
        return watch.measure(self._engine, detokenize_s=self._detokenize_s(answers))

    def load(self, conversations: Sequence[Messages], domain: str, max_tokens: int, due: Sequence[float]) -> Measure:
        """Open loop: each arrives when it is due (seconds from now), whether or not there is a place."""
        requests = self._requests(conversations, domain, max_tokens)
        watch = StepWatch(self._engine)
        feed = feed_at(requests, due, idle=lambda: self._engine.idle, watch=watch)
        answers = self._answers(self._runner.run(feed, between=watch.step), watch)
        self._drain()
        return watch.measure(self._engine, detokenize_s=self._detokenize_s(answers))

    def swap(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> dict[str, float]:
        """Seconds that a swap of the drafter holds decoding up, and of steps before it and while it was prepared."""
        if self._slot is None:
            raise RedraftError("a contender without a drafter has nothing to swap")
        steps_s = self._decode_steps(conversations, domain, max_tokens)
        ready: list[Swap] = []
        version, slot = f"bench-{self._calls}", self._slot
        preparing = threading.Thread(target=lambda: ready.append(slot.prepare(None, version)))
        pauses: list[float] = []

        def between(engine: Engine) -> None:
            if ready and not pauses:
                began = time.perf_counter()
                ready[0]()
                engine.controller.new_version()
                pauses.append(time.perf_counter() - began)

        preparing.start()
        meanwhile: list[float] = []
        for _ in range(_SWAP_ROUNDS):
            if pauses:
                break
            meanwhile += self._decode_steps(conversations, domain, max_tokens, between)
        preparing.join()
        if not pauses:
            raise RedraftError("the drafter could not be prepared while requests were answered")
        step_s = median(steps_s)
        return {"pause_s": pauses[0], "step_s": step_s, "step_while_preparing_s": median(meanwhile)}

    def stop(self) -> None:
        if self._publisher is not None:
            self._publisher.stop()
        if self._store is not None:
            self._store.close()

    @property
    def _engine(self) -> Engine:
        return self._runner.engine

    def _decode_steps(
        self, conversations: Sequence[Messages], domain: str, max_tokens: int, between: Between | None = None
    ) -> list[float]:
        """Seconds of each pure decoding step of one call."""
        requests = self._requests(conversations, domain, max_tokens)
        watch = StepWatch(self._engine)
        for request in requests:
            watch.arrived(request.id)

        def after(engine: Engine) -> None:
            watch.step(engine)
            if between is not None:
                between(engine)

        self._answers(self._runner.run(requests, between=after), watch)
        return watch.decode_steps_s

    def _answers(self, answers: Iterator[Answer], watch: StepWatch) -> list[Answer]:
        found = []
        for answer in answers:
            if answer.ending.reason in ("failed", "cancelled"):
                raise RedraftError(f"a request {answer.ending.reason}: {answer.ending.message}")
            watch.ended(answer)
            found.append(answer)
        return found

    def _requests(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> list[GenerationRequest]:
        self._calls += 1
        params = GenerationParams(
            sampling=Sampling(temperature=self._temperature), max_tokens=max_tokens, ignore_eos=self._ignore_eos
        )
        return [
            GenerationRequest(f"{self._calls}-{index}", self._encode(conversation), params, domain)
            for index, conversation in enumerate(conversations)
        ]

    def _longest(self, config: Config, job: Mapping[str, Any]) -> int:
        """Positions of the longest conversation and its answer, and room for drafts beyond it."""
        from transformers import AutoTokenizer

        from shared.models.target import resolve_model

        folder = resolve_model(config.target.model, config.home_path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        prompts = [len(self._encode(conversation)) for conversation in job["conversations"]]
        return max(prompts) + int(job["max_tokens"]) + config.drafter.gamma_max + 1

    def _encode(self, conversation: Messages) -> tuple[int, ...]:
        """As the chat endpoint would; remembered, so that no timed call tokenizes."""
        key = repr(conversation)
        if key not in self._ids:
            text = self._tokenizer.apply_chat_template(list(conversation), add_generation_prompt=True, tokenize=False)
            self._ids[key] = tuple(self._tokenizer.encode(str(text), add_special_tokens=False))
        return self._ids[key]

    def _detokenize_s(self, answers: Sequence[Answer]) -> float:
        """What making text took within the sampling phase: the same tokens through the same code, once more."""
        began = time.perf_counter()
        for answer in answers:
            detokenizer = Detokenizer(self._loaded.tokenizer, (), self._loaded.eos_token_ids)
            for token in answer.token_ids:
                detokenizer.push(token)
        return time.perf_counter() - began

    def _tracing(self, config: Config) -> Tracing:
        publisher = self._publisher
        assert publisher is not None

        def offer(record: Any, features: Tensor | None) -> None:
            self._offered += 1
            publisher.offer(record, features)

        return Tracing(offer, "bench", config.trace.topk, config.trace.position_share, lambda _request: True)

    def _outbox(self, config: Config, store: Store) -> TracePublisher:
        return TracePublisher(
            store,
            "bench",
            queue_size=config.trace.queue,
            stream_bytes=config.trace.stream_bytes,
            features=_FeaturesTaken(),
            privacy=Privacy.of(config),
            counters=lambda: dict(self._engine.counters.fields),
            status=dict,
        )

    def _drain(self) -> None:
        """A trace leaves when its request has ended: the call lasts until Redis has it, or it would cost nothing."""
        publisher = self._publisher
        if publisher is None:
            return
        deadline = time.monotonic() + _DRAIN_S
        while publisher.published + publisher.dropped < self._offered:
            if time.monotonic() > deadline:
                raise RedraftError("traces do not reach Redis")
            time.sleep(0.0005)


class _FeaturesTaken:
    """Stands where Ray's object store would: the engine's own cost of features is paid, the transport's is not."""

    dropped = 0

    def offer(self, id: str, features: Tensor) -> bool:
        return True

    def stop(self) -> None:
        """Nothing is kept."""


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()
