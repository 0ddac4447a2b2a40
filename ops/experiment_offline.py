"""Arms that do not change while traffic comes: the base drafter, and one that is distilled offline from the base.

Offline drafters learn as an attempt does (same rank, rate, batches and loss), but from all domains at once and from
records that are not in the stream, so what they are judged on they have not seen either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from learner.attempt import train_settings
from learner.base import Base
from learner.evaluator import Judged
from learner.example import Example
from learner.measure import gamma_of, judge_each
from learner.trainer import train
from learner.tuning import LoraTuning, install
from learner.unroll import Drafter
from ops.experiment_arms import Arm
from ops.experiment_result import ArmResult
from shared.artifact import Manifest
from shared.config import Config

Say = Callable[[float, str], None]  # share that is done, and what is being done
AT_ONCE = 32  # records judged together


def run_static(arm: Arm, config: Config, base: Base, stream: Sequence[Example], say: Say) -> ArmResult:
    began = time.monotonic()
    judged = judge_all(base.module, stream, config, base, lambda done: say(done, "judging"))
    return ArmResult(arm.name, tuple(judged), {"judging": time.monotonic() - began})


def run_offline(
    arm: Arm,
    config: Config,
    base: Base,
    stream: Sequence[Example],
    data: Sequence[Example],  # the arm's share of it
    passes: float,
    seed: int,
    say: Say,
) -> ArmResult:
    began = time.monotonic()
    tuning = LoraTuning(config.learner)
    candidate = tuning.candidate(base, None, seed)
    report = train(
        candidate,
        data,
        settings=train_settings(config.learner, candidate, epochs=passes, seed=seed),
        progress=lambda p: say(0.8 * p.step / p.steps, f"training, loss {p.loss:.3f}"),
    )
    trained = time.monotonic()
    manifest = Manifest(version=arm.name, kind=base.kind, form="lora", target=base.target, base=base.hash)
    module = base.copy()
    install(module, tuning.export(candidate, manifest))
    judged = judge_all(module, stream, config, base, lambda done: say(0.8 + 0.2 * done, "judging"))
    seconds = {"training": trained - began, "judging": time.monotonic() - trained}
    return ArmResult(arm.name, tuple(judged), seconds, report.tokens)


def judge_all(
    drafter: Drafter,
    examples: Sequence[Example],
    config: Config,
    base: Base,
    say: Callable[[float], None] = lambda done: None,
) -> list[Judged]:
    """A few at a time, so that progress is seen."""
    gamma, found = gamma_of(config.drafter), list[Judged]()
    for first in range(0, len(examples), AT_ONCE):
        mine = examples[first : first + AT_ONCE]
        found += judge_each(drafter, mine, [gamma] * len(mine), base.token_count)
        say(len(found) / len(examples))
    return found
