"""One training attempt: continue the champion on the newest traffic, then prove it on traffic that came after.

The candidate is judged on requests that arrived later than all that it learnt from, with prompts that nothing was ever
trained on, and on frozen probes of every domain. It ends in a decision, and changes no champion itself. Consuming goes
on meanwhile: `breathe` is called between steps, and may raise to stop. Whatever is in use is pinned in the buffer, and
what was learnt from is so across restarts: an interrupted attempt is repeated from its start, to the same candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from learner.bank import DrafterBank
from learner.base import Base
from learner.buffer import Buffer, Measured
from learner.evaluator import Judged
from learner.example import Example
from learner.gate import Decision, Gate, Pair
from learner.lineage import origin_of
from learner.measure import judge_each
from learner.schedule import Outcome
from learner.trainer import TrainReport, TrainSettings, bf16_pays, train
from learner.tuning import LoraTuning, Tuning
from learner.unroll import Drafter
from shared.artifact import Artifact, Manifest
from shared.config import Config, LearnerConfig

EPOCHS = 4.0  # most passes over the sample, when it holds less than learner.attempt_tokens
JUDGED = 8  # times gate.min_requests: most fresh requests that are judged
AT_ONCE = 8  # requests judged between two breaths
WAIT_MS = 500

Breathe = Callable[[str, int], None]  # what is being done, and how many milliseconds there are to spare
Prepare = Callable[[Sequence[Example]], Sequence[Example]]  # what is done to examples before they are learnt from


@dataclass(frozen=True)
class Attempt:
    """How an attempt went."""

    number: int
    focus: tuple[str, ...]
    parent: str  # version that it continued
    artifact: Artifact  # the candidate
    report: TrainReport
    decision: Decision
    undecided: bool  # too little came to judge on
    snapshot: int  # order of the last arrival that it could have learnt from
    requests: int  # learnt from
    window: tuple[float, float]  # finish times of the first and the last of them
    started_at: float
    ended_at: float

    @property
    def outcome(self) -> Outcome:
        """By the gate alone."""
        return "undecided" if self.undecided else "promoted" if self.decision.promote else "refused"


class AttemptRunner:
    """Belongs to the loop's thread, as the buffer does."""

    def __init__(
        self,
        config: Config,
        base: Base,
        buffer: Buffer,
        bank: DrafterBank,
        *,
        round_s: Callable[[], Sequence[float]] = tuple,
        prepare: Prepare = lambda examples: examples,
        clock: Callable[[], float] = time.monotonic,
        tuning: Tuning | None = None,  # None: an adapter, as the configuration says
    ) -> None:
        """`round_s` gives the seconds of a round by gamma, as replicas measure them now; empty: not known."""
        self._config, self._base, self._buffer, self._bank = config, base, buffer, bank
        self._round_s, self._prepare, self._clock = round_s, prepare, clock
        self._tuning = tuning or LoraTuning(config.learner)
        self._probes: dict[tuple[str, int], Judged] = {}  # by version and order

    def run(
        self,
        number: int,
        *,
        focus: Sequence[str],
        name: str,  # the candidate's version, should it be promoted
        parent: str,
        parent_artifact: Artifact | None,  # None: the parent is the base
        breathe: Breathe,
    ) -> Attempt | None:
        """Trains, waits for fresh requests, judges. None when the buffer holds nothing to learn from.

        An attempt that was interrupted begins again on the same requests with the same seed. Its inputs stay pinned
        until the buffer is told that it has ended.
        """
        started_at, learner = time.time(), self._config.learner
        begun = self._buffer.begun_attempt(number)
        if begun is not None:
            orders, snapshot = begun
        else:
            snapshot = self._buffer.newest()
            orders = self._buffer.sample(
                focus, tokens=learner.attempt_tokens, replay_share=learner.replay_share, seed=number
            )
        if not orders:
            return None
        with ExitStack() as pins:
            self._buffer.begin_attempt(number, orders, snapshot)
            lineage = origin_of(parent_artifact, self._buffer.tenants(orders))
            candidate = self._tuning.candidate(self._base, parent_artifact, seed=number)
            report = self._train(candidate, orders, number, breathe)
            fresh = self._wait(snapshot, breathe)
            pins.enter_context(self._buffer.pinned(fresh))
            decision = self._decide(candidate, parent, fresh, number, breathe)
        manifest = Manifest(
            version=name,
            kind=self._base.kind,
            form="lora",
            target=self._base.target,
            base=self._base.hash,
            parent=parent,
            created_at=time.time(),
            metrics=_metrics(decision),
            origin={
                "attempt": number,
                "trained_to": snapshot,
                "requests": len(orders),
                "tokens": report.tokens,
                **lineage,
            },
        )
        return Attempt(
            number=number,
            focus=tuple(focus),
            parent=parent,
            artifact=self._tuning.export(candidate, manifest),
            report=report,
            decision=decision,
            undecided=decision.requests < self._config.gate.min_requests,
            snapshot=snapshot,
            requests=len(orders),
            window=self._buffer.span(orders),
            started_at=started_at,
            ended_at=time.time(),
        )

    def _train(self, candidate: Drafter, orders: Sequence[int], number: int, breathe: Breathe) -> TrainReport:
        learner = self._config.learner
        tokens = self._buffer.tokens(orders)
        epochs = min(EPOCHS, learner.attempt_tokens / max(tokens, 1))
        return train(
            candidate,
            self._prepare(_Lazily(self._buffer, orders)),
            settings=train_settings(learner, candidate, epochs=epochs, seed=number),
            progress=lambda p: breathe(f"training, step {p.step} of {p.steps}", 0),
        )

    def _wait(self, snapshot: int, breathe: Breathe) -> list[int]:
        """Requests that came after the snapshot, newest first; as many as the gate needs, or the time is up."""
        gate = self._config.gate
        deadline = self._clock() + gate.wait_s
        while True:
            fresh = self._buffer.judgeable(snapshot)
            if len(fresh) >= gate.min_requests or self._clock() >= deadline:
                return fresh[: JUDGED * gate.min_requests]
            breathe(f"waiting for requests to judge on, {len(fresh)} of {gate.min_requests}", WAIT_MS)

    def _decide(
        self, candidate: Drafter, champion: str, fresh: Sequence[int], number: int, breathe: Breathe
    ) -> Decision:
        gate = Gate(self._config.gate, seed=number)
        mine = self._judge(candidate, fresh, breathe)
        pair = (mine, self._judge_champion(champion, fresh, breathe))
        round_s = self._seconds(fresh)
        decision = gate.decide(*pair, round_s=round_s)
        if not decision.promote:
            return decision  # the probes could only have been one more reason
        probes: dict[str, Pair] = {
            domain: (self._judge(candidate, orders, breathe), self._judge_probes(champion, orders, breathe))
            for domain, orders in self._buffer.probes().items()
        }
        return gate.decide(*pair, probes, round_s=round_s)

    def _seconds(self, orders: Sequence[int]) -> list[float]:
        """Of a round at the gamma of each request; empty while no replica has said what rounds cost."""
        by_gamma = list(self._round_s())
        if not by_gamma:
            return []
        return [by_gamma[min(self._buffer.measured(order).gamma, len(by_gamma) - 1)] for order in orders]

    def _judge(self, drafter: Drafter, orders: Sequence[int], breathe: Breathe) -> list[Judged]:
        """At each request's own gamma, as it was measured."""
        found: list[Judged] = []
        for first in range(0, len(orders), AT_ONCE):
            mine = orders[first : first + AT_ONCE]
            examples = [self._buffer.load(order) for order in mine]
            gammas = [self._buffer.measured(order).gamma for order in mine]
            found += judge_each(drafter, examples, gammas, self._base.token_count)
            breathe(f"judging, {len(found)} of {len(orders)} requests", 0)
        return found

    def _judge_champion(self, version: str, orders: Sequence[int], breathe: Breathe) -> list[Judged]:
        """Most of the fresh requests were measured with the champion when they arrived: that is the same judgement."""
        measured = {order: self._buffer.measured(order) for order in orders}
        others = [order for order in orders if measured[order].version != version]
        judged = dict(zip(others, self._judge(self._module(version), others, breathe), strict=True))
        return [
            judged[order] if order in judged else _as_judged(self._buffer.load(order), measured[order])
            for order in orders
        ]

    def _judge_probes(self, version: str, orders: Sequence[int], breathe: Breathe) -> list[Judged]:
        """Probes stay the same, so a version is judged on each of them once."""
        missing = [order for order in orders if (version, order) not in self._probes]
        judged = self._judge(self._module(version), missing, breathe)
        self._probes = {key: found for key, found in self._probes.items() if key[0] == version}
        self._probes |= {(version, order): found for order, found in zip(missing, judged, strict=True)}
        return [self._probes[version, order] for order in orders]

    def _module(self, version: str) -> Drafter:
        module = self._bank.get(version)
        assert module is not None, "the champion is on the shelf"
        return module


def train_settings(learner: LearnerConfig, candidate: Drafter, *, epochs: float, seed: int) -> TrainSettings:
    return TrainSettings(
        learning_rate=learner.learning_rate,
        batch_tokens=learner.batch_tokens,
        epochs=epochs,
        loss=learner.loss,
        ttt_steps=learner.ttt_steps,
        rejected_weight=learner.rejected_weight,
        bf16=bf16_pays(next(candidate.parameters()).device),
        seed=seed,
    )


class _Lazily(Sequence[Example]):
    """Reads from the buffer when an element is asked for."""

    def __init__(self, buffer: Buffer, orders: Sequence[int]) -> None:
        self._buffer, self._orders = buffer, orders

    def __len__(self) -> int:
        return len(self._orders)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return self._buffer.load(self._orders[index])


def _as_judged(example: Example, measured: Measured) -> Judged:
    return Judged(
        id=example.record.id,
        domain=example.record.domain,
        seeded=example.record.sampling.seeded,
        positions=measured.positions,
        first=measured.live_sum,
        accepted=measured.live_expected_accepted,
        tested=measured.live_expected_tested,
        steps=measured.live_expected_steps,
    )


def _metrics(decision: Decision) -> dict[str, float]:
    return {
        "alpha_before": decision.alpha_champion,
        "alpha_after": decision.alpha_candidate,
        "gain": decision.gain.value,
        "gain_low": decision.gain.low,
        "gain_high": decision.gain.high,
        "speedup": decision.speedup.value,
        "speedup_low": decision.speedup.low,
        "judged_requests": decision.requests,
    }
