"""Watches an engine from step to step and adds up what one call of it did.

Looks at nothing but public counters and the running sequences, between two steps. Steps in which some prompt was read
are kept apart: what a step costs, and what of it is not a model, is asked of pure decoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from ops.bench_measure import Clock, Decode, Measure, times_of
from serving.batch import Answer
from serving.engine.engine import Engine
from shared.counters import Counters

_SECONDS = "_s"  # the suffix of the engine's time counters, which carry no tags
_FORWARD = "verify_s"  # grows with each forward of the target, and only then


class StepWatch:
    """One call. `step` goes to `BatchRunner.run(between=)`, `ended` takes each answer."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began = clock, clock()
        self._before = Counters(engine.counters.fields)
        self._phases, self._totals = _phases(engine.counters.fields), _sums(engine.counters.fields)
        self._clocks: dict[str, Clock] = {}
        self._lengths: Counter[int] = Counter()
        self._decode: Counter[str] = Counter()
        self._decode_s, self._decode_phases = 0.0, dict.fromkeys(self._phases, 0.0)
        self._forwards = 0
        self._last = 0.0
        self.decode_steps_s: list[float] = []  # of each pure decoding step, in order

    @property
    def now(self) -> float:
        """Seconds since the call began."""
        return self._clock() - self._began

    def arrived(self, id: str, at: float = 0.0) -> None:
        """A request that is waited for since `at`."""
        self._clocks[id] = Clock(at)

    def step(self, engine: Engine) -> None:
        """After each step of the engine."""
        now = self.now
        fields = engine.counters.fields
        phases = _phases(fields)
        if phases.get(_FORWARD, 0.0) == self._phases.get(_FORWARD, 0.0):
            self._last = now  # nothing could run: waiting is not part of any step
            return
        totals = _sums(fields)
        reading = self._deliver(engine, now)
        self._forwards += 1
        if not reading:
            self._decode["forwards"] += 1
            self._decode.update({name: totals[name] - self._totals[name] for name in totals})
            self._decode_s += now - self._last
            self.decode_steps_s.append(now - self._last)
            for name, value in phases.items():
                gained = value - self._phases.get(name, 0.0)
                self._decode_phases[name] = self._decode_phases.get(name, 0.0) + gained
        self._phases, self._totals, self._last = phases, totals, self.now

    def ended(self, answer: Answer) -> None:
        """An answer of the step before."""
        stats = answer.ending.stats
        clock = self._clocks[answer.request.id]
        clock.deliver(self._last, answer.ending.completion_tokens - clock.tokens)
        self._lengths[0] += stats.num_steps - stats.num_spec_steps
        for length, histogram in stats.by_draft_length.items():
            self._lengths[length] += sum(histogram)

    def measure(self, engine: Engine, *, detokenize_s: float = 0.0) -> Measure:
        """Everything up to now. `detokenize_s` is the part of the sampling phase that made text."""
        seconds = self.now
        gained = Counters(engine.counters.fields).minus(self._before)
        phases = {name.removesuffix(_SECONDS): value for name, value in gained.fields.items() if _is_time(name)}
        return Measure(
            seconds=seconds,
            tokens=sum(clock.tokens for clock in self._clocks.values()),
            times=times_of(list(self._clocks.values())),
            forwards=self._forwards,
            steps=int(gained.total("steps")),
            decode=Decode(
                forwards=self._decode["forwards"],
                steps=self._decode["steps"],
                tokens=self._decode["emitted"],
                seconds=self._decode_s,
                phases={name.removesuffix(_SECONDS): value for name, value in self._decode_phases.items()},
                drafted=self._decode["drafted"],
                tested=self._decode["tested"],
                accepted=self._decode["accepted"],
            ),
            phases=_with_text(phases, detokenize_s),
            drafted_lengths={str(length): steps for length, steps in sorted(self._lengths.items()) if steps},
            drafted=int(gained.total("drafted")),
            tested=int(gained.total("tested")),
            accepted=int(gained.total("accepted")),
        )

    def _deliver(self, engine: Engine, now: float) -> bool:
        """Notes who gained tokens; True when the step read some prompt."""
        reading = False
        running = {sequence.id: sequence.committed for sequence in engine.scheduler.running}
        for id, clock in self._clocks.items():
            if id in running:
                reading |= not clock.started
                clock.deliver(now, running[id] - clock.tokens)
            elif not clock.started and id not in self._waiting(engine):
                reading = True  # its only token came with its prompt
        return reading

    @staticmethod
    def _waiting(engine: Engine) -> set[str]:
        return {sequence.id for sequence in engine.scheduler.waiting}


def _is_time(name: str) -> bool:
    return name.endswith(_SECONDS) and "|" not in name


def _phases(fields: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in fields.items() if _is_time(name)}


def _sums(fields: Mapping[str, float]) -> dict[str, int]:
    sums = dict.fromkeys(("steps", "emitted", "drafted", "tested", "accepted"), 0)
    for key, value in fields.items():
        name = key.partition("|")[0]
        if name in sums:
            sums[name] += int(value)
    return sums


def _with_text(phases: dict[str, float], detokenize_s: float) -> dict[str, float]:
    """The text's part moved out of the sampling phase, unless the engine counts it itself."""
    if "detokenize" in phases or not detokenize_s:
        return phases
    return {
        **phases,
        "sample": max(phases.get("sample", 0.0) - detokenize_s, 0.0),
        "detokenize": min(detokenize_s, phases.get("sample", 0.0)),
    }
