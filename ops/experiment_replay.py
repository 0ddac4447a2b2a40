"""An online arm: the learner's own parts over recorded traffic, in simulated time.

Time is counted in tokens: traffic comes at a fixed rate, and each training step takes as long as its tokens do at
another, so what arrives during an attempt is judged with the old champion, as it is in service. Each record is judged
by the version that would have served it before anything learns from it. It ends with the traffic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from learner.attempt import Attempt, AttemptRunner
from learner.bank import DrafterBank
from learner.base import BASE_VERSION, Base
from learner.buffer import Arrival, Buffer, Measured
from learner.database import Database
from learner.evaluator import Judged
from learner.example import Example
from learner.lookout import Lookout
from learner.measure import gamma_of, judge_each, measured_as
from learner.schedule import Plan, Progress, plan_attempt, tried_in_vain
from learner.standing import Standing
from learner.tuning import FullTuning, LoraTuning
from learner.unroll import Drafter
from ops.experiment_arms import Arm
from ops.experiment_offline import Say, judge_all
from ops.experiment_result import ArmResult, AttemptFacts, Version
from shared.artifact import Artifact, open_blob, pack_blob
from shared.config import Config
from shared.trace import encode

AT_ONCE = 8  # records that arrive between two looks at what to do


class _TrafficEnded(Exception):
    """Unwinds an attempt that would end after the traffic. Never leaves this module."""


class Replay:
    """`static` is what the base earns on each record of `stream`."""

    def __init__(
        self,
        arm: Arm,
        config: Config,
        base: Base,
        stream: Sequence[Example],
        static: Sequence[Judged],
        *,
        served_per_s: float,
        learnt_per_s: float,
        full_learning_rate: float,
        folder: Path,  # empty; for the learner's database and every version that served, as long as this is in use
        say: Say,
    ) -> None:
        self._arm, self._config, self._base = arm, _config_of(arm, config, full_learning_rate), base
        self._stream, self._static, self._say = stream, static, say
        tokens = (len(example.record.output_ids) for example in stream)
        self._due = [total / served_per_s for total in accumulate(tokens)]  # seconds at which each record is whole
        self._step_s = config.learner.batch_tokens / learnt_per_s
        self._now, self._arrived = 0.0, 0
        self._waiting: list[int] = []  # arrived and not judged yet
        self._judged: list[Judged] = []
        self._folder = folder
        self._versions = [Version(BASE_VERSION, 0)]
        self._attempts: list[AttemptFacts] = []
        self._seconds = {"judging": 0.0, "attempts": 0.0}
        learner = self._config.learner
        database = Database(folder / "buffer.sqlite")
        buffer = Buffer(database, recent=learner.buffer_recent, reservoir=learner.buffer_reservoir)
        self._standing = Standing(database, buffer, Lookout(), Progress())
        self._bank = DrafterBank(base, self._artifact)
        self._runner = AttemptRunner(
            self._config,
            base,
            buffer,
            self._bank,
            clock=lambda: self._now,
            tuning=FullTuning() if arm.full else LoraTuning(learner),
        )

    def run(self) -> ArmResult:
        try:
            while self._arrived < len(self._stream):
                self._wait_for(AT_ONCE)
                plan = plan_attempt(self._standing.situation(), self._config.learner.min_fresh_tokens)
                if plan.attempt and self._arrived < len(self._stream):
                    self._attempt(plan)
        except _TrafficEnded:
            pass
        finally:
            self._standing.database.close()
        return ArmResult(
            arm=self._arm.name,
            judged=tuple(self._judged),
            seconds=self._seconds,
            tokens_learnt=sum(attempt.tokens for attempt in self._attempts),
            versions=self._served(),
            attempts=tuple(self._attempts),
        )

    def module(self, version: str) -> Drafter:
        module = self._bank.get(version)
        assert module is not None, "every version that served is kept"
        return module

    # Time

    def _wait_for(self, records: int) -> None:
        """Until so many more have arrived, or all."""
        self._now = max(self._now, self._due[min(self._arrived + records, len(self._stream)) - 1])
        self._arrive()
        self._judge_arrived()

    def _breathe(self, doing: str, wait_ms: int) -> None:
        """Work takes a training step's time, whether it trains or judges; what arrived is only looked at when asked."""
        self._now += wait_ms / 1000 if wait_ms else self._step_s
        self._arrive()
        if wait_ms or len(self._waiting) >= AT_ONCE or self._arrived == len(self._stream):
            self._judge_arrived()
        if self._arrived == len(self._stream):
            raise _TrafficEnded
        self._say(self._arrived / len(self._stream), f"{self._champion}, {doing}")

    def _arrive(self) -> None:
        while self._arrived < len(self._stream) and self._due[self._arrived] <= self._now:
            self._waiting.append(self._arrived)
            self._arrived += 1

    # What the learner does with a record

    def _judge_arrived(self) -> None:
        began, waiting, self._waiting = time.monotonic(), self._waiting, []
        if not waiting:
            return
        examples, static = [self._stream[i] for i in waiting], [self._static[i] for i in waiting]
        gamma, live = gamma_of(self._config.drafter), static
        if self._champion != BASE_VERSION:
            live = judge_each(self.module(self._champion), examples, [gamma] * len(examples), self._base.token_count)
        buffer, lookout = self._standing.buffer, self._standing.lookout
        measured = [
            measured_as(example.record, self._champion, gamma, mine, theirs)
            for example, mine, theirs in zip(examples, live, static, strict=True)
        ]
        buffer.add([_arrival(example, found) for example, found in zip(examples, measured, strict=True)])
        for example, found in zip(examples, measured, strict=True):
            lookout.update(buffer.domain_of(example.record.domain), found.live_sum, found.positions)
        self._judged += live
        self._seconds["judging"] += time.monotonic() - began
        self._say(self._arrived / len(self._stream), f"{self._champion}")

    def _attempt(self, plan: Plan) -> None:
        standing, begun = self._standing, self._arrived
        progress = standing.progress.begun(plan.focus)
        standing.keep(progress)
        before, judging = time.monotonic(), self._seconds["judging"]
        try:
            attempt = self._runner.run(
                progress.attempts,
                focus=plan.focus or tuple(standing.buffer.fresh_tokens(progress.trained_to)),
                name=f"v{progress.promotions + 1}",
                parent=self._champion,
                parent_artifact=self._artifact(self._champion),
                breathe=self._breathe,
            )
        finally:
            self._seconds["attempts"] += time.monotonic() - before - (self._seconds["judging"] - judging)
        assert attempt is not None, "there were fresh tokens to learn from"
        self._judge_arrived()  # by the champion that served them
        self._conclude(attempt, plan, begun)

    def _conclude(self, attempt: Attempt, plan: Plan, begun: int) -> None:
        standing = self._standing
        outcome = attempt.outcome if self._arm.gate else "promoted"
        if outcome == "promoted":
            version = attempt.artifact.manifest.version
            (self._folder / version).write_bytes(pack_blob(attempt.artifact))
            self._versions.append(Version(version, self._arrived))
        reason = attempt.decision.reason if self._arm.gate else f"no gate, which says: {attempt.decision.reason}"
        standing.keep(standing.progress.ended(outcome, attempt.snapshot, reason))
        if tried_in_vain(standing.progress):
            standing.settle()
        self._attempts.append(
            AttemptFacts(
                number=attempt.number,
                begun=begun,
                ended=self._arrived,
                why=plan.reason,
                reason=reason,
                promoted=outcome == "promoted",
                tokens=attempt.report.tokens,
            )
        )

    def _artifact(self, version: str) -> Artifact | None:
        """None for the base."""
        path = self._folder / version
        return open_blob(path.read_bytes()) if path.exists() else None

    @property
    def _champion(self) -> str:
        return self._versions[-1].name

    def _served(self) -> tuple[Version, ...]:
        """Each version with the domains of the records that it served."""
        ends = [version.record for version in self._versions[1:]] + [len(self._stream)]
        found = []
        for version, end in zip(self._versions, ends, strict=True):
            mine = (example.record.domain for example in self._stream[version.record : end])
            found.append(replace(version, domains=tuple(dict.fromkeys(mine))))
        return tuple(found)


def look_back(
    replay: Replay, result: ArmResult, config: Config, base: Base, apart: dict[str, list[Example]], say: Say
) -> ArmResult:
    """Adds what each version earns on other records of the domains that it served, and the last one on all."""
    began, found = time.monotonic(), dict[str, dict[str, list[tuple[float, int]]]]()
    last = result.versions[-1].name
    for number, version in enumerate(result.versions, start=1):
        for domain, examples in apart.items():
            if domain not in version.domains and version.name != last:
                continue
            judged = judge_all(replay.module(version.name), examples, config, base)
            found.setdefault(domain, {})[version.name] = [(j.first, j.positions) for j in judged]
        say(number / len(result.versions), f"looking back with {version.name}")
    seconds = {**result.seconds, "looking back": time.monotonic() - began}
    return replace(result, looked_back=found, seconds=seconds)


def _config_of(arm: Arm, config: Config, full_learning_rate: float) -> Config:
    learner, gate = config.learner, config.gate
    if arm.full:
        learner = replace(learner, learning_rate=full_learning_rate)
    if not arm.replay:
        learner = replace(learner, replay_share=0.0)
    if not arm.gate:
        gate = replace(gate, wait_s=0.0)  # there is no proof to wait for
    return replace(config, learner=learner, gate=gate)


def _arrival(example: Example, measured: Measured) -> Arrival:
    record, features = example.record, example.features
    return Arrival(record.id, encode(record), record, None if features is None else features.half().numpy(), measured)
