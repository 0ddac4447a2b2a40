"""Predicted beside measured: the planner's round times against this machine's own engine, plain and speculating.

The engine is built and stepped in this process, without HTTP; the planner sees the config, the machine's figures, the
contexts that were served and the alpha that came out, never a step's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ops.plan_roofline import Model
from ops.plan_rounds import Drafting, round_of
from ops.prompt_sets import load_prompts
from serving.batch import BatchRunner
from serving.drafters.load import load_drafter
from serving.engine.engine import Engine, Limits
from serving.engine.request import GenerationParams, GenerationRequest
from serving.spec.gamma import GammaController
from shared.config import Config
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel
from shared.trace import Sampling

_OUTPUT = 64  # tokens of each request
_SETTLE = 4  # first steps, with prompts in them or caches still cold


@dataclass(frozen=True)
class Compared:
    """One batch and gamma. Seconds of a round; tokens a second of the batch."""

    batch: int
    gamma: int
    context: float
    accepted: int
    tested: int
    predicted_seconds: float
    measured_seconds: float
    predicted_tokens: float
    measured_tokens: float

    @property
    def step_ratio(self) -> float:
        return self.predicted_seconds / self.measured_seconds

    @property
    def tokens_ratio(self) -> float:
        return self.predicted_tokens / self.measured_tokens


def compare(
    config: Config,
    loaded: LoadedModel,
    target: Model,
    drafting: Drafting,
    batches: Sequence[int],
    gammas: Sequence[int],
) -> list[Compared]:
    """`drafting` says what drafts with gamma above 0; its alpha is replaced by the one that is counted."""
    return [
        _compare(config, loaded, target, drafting, batch, gamma)
        for gamma in gammas
        if not gamma or drafting.drafter is not None
        for batch in batches
    ]


def _compare(
    config: Config, loaded: LoadedModel, target: Model, drafting: Drafting, batch: int, gamma: int
) -> Compared:
    served = _serve(config, loaded, batch, gamma)
    alpha = served.accepted / served.tested if served.tested else 0.0
    counted = replace(drafting, alpha=alpha) if gamma else Drafting("none", 0.0)
    predicted = round_of(target, counted, batch, gamma, served.context)
    return Compared(
        batch=batch,
        gamma=gamma,
        context=served.context,
        accepted=served.accepted,
        tested=served.tested,
        predicted_seconds=predicted.seconds,
        measured_seconds=served.seconds,
        predicted_tokens=batch * predicted.tokens / predicted.seconds,
        measured_tokens=served.tokens_rate,
    )


@dataclass(frozen=True)
class _Served:
    seconds: float  # median of a step in which everybody decoded
    tokens_rate: float  # in those steps
    context: float
    accepted: int
    tested: int


def _serve(config: Config, loaded: LoadedModel, batch: int, gamma: int) -> _Served:
    engine = config.engine
    kv = PagedKV(-(-engine.kv_tokens // engine.block_size), engine.block_size)
    slot = load_drafter(config, loaded, kv) if gamma else None
    drafter = slot.drafter if slot is not None else None
    controller = GammaController(fixed=gamma, most=max(gamma, 1), exploration=0.0)
    context = min(loaded.max_positions, engine.kv_tokens)
    runner = BatchRunner(
        PagedModel(loaded, kv, drafter.feature_layers if drafter is not None else ()),
        drafter,
        controller,
        Limits(context, batch, engine.prefill_tokens),
    )
    seconds: list[float] = []
    contexts: list[float] = []
    tokens = accepted = tested = 0
    last = {"at": time.perf_counter(), "emitted": 0.0, "accepted": 0.0, "tested": 0.0}

    def look(engine: Engine) -> None:
        nonlocal tokens, accepted, tested
        now = {"at": time.perf_counter()} | {
            name: engine.counters.total(name) for name in ("emitted", "accepted", "tested")
        }
        running = engine.scheduler.running
        if len(running) == batch and all(s.committed > _SETTLE for s in running):
            seconds.append(now["at"] - last["at"])
            contexts.append(sum(len(s.tokens) for s in running) / batch)
            tokens += round(now["emitted"] - last["emitted"])
            accepted += round(now["accepted"] - last["accepted"])
            tested += round(now["tested"] - last["tested"])
        now["at"] = time.perf_counter()
        last.update(now)

    for _ in runner.run(_requests(loaded, batch), between=look):
        pass
    return _Served(median(seconds), tokens / sum(seconds), sum(contexts) / len(contexts), accepted, tested)


def _requests(loaded: LoadedModel, batch: int) -> list[GenerationRequest]:
    """Greedy, of equal length, and different, so that all decode together to the end."""
    params = GenerationParams(sampling=Sampling(temperature=0.0), max_tokens=_OUTPUT, ignore_eos=True)
    texts = load_prompts("chat", "demo", count=batch)
    return [
        GenerationRequest(f"plan-{index}", tuple(loaded.tokenizer(text)["input_ids"]), params)
        for index, text in enumerate(texts)
    ]
