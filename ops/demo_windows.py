"""Windows of the run: what the replicas' cumulative counters gained between two looks, by domain.

Owns the subtraction. A replica that restarts counts in a new epoch, and counters that are missing for a while (Redis
away, or back and empty) keep their last known value, so nothing is counted twice or lost. Counts only, no ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shared.counters import Counters

Epochs = Mapping[tuple[str, str], Mapping[str, float]]  # (replica, epoch) -> cumulative counters


@dataclass(frozen=True)
class DomainCounts:
    accepted: float
    tested: float
    drafted: float
    steps: float
    emitted: float


@dataclass(frozen=True)
class Window:
    start: float  # seconds since the epoch
    end: float
    tokens: float  # emitted since the run began, at `end`
    domains: Mapping[str, DomainCounts]  # those with traffic in this window
    version: str  # drafter at the end; empty: none

    @property
    def emitted(self) -> float:
        return sum(counts.emitted for counts in self.domains.values())


class Meter:
    """Turns looks at the counters into windows. The first look is the zero."""

    def __init__(self, epochs: Epochs, now: float) -> None:
        self._known = {key: dict(counters) for key, counters in epochs.items()}
        self._base = Counters.merge(self._known.values())
        self._last, self._last_at = self._base, now

    @property
    def since_start(self) -> Counters:
        return Counters.merge(self._known.values()).minus(self._base)

    def look(self, epochs: Epochs) -> None:
        self._known.update({key: dict(counters) for key, counters in epochs.items()})

    def cut(self, now: float, version: str) -> Window:
        """The window since the last cut, up to the last look."""
        total = Counters.merge(self._known.values())
        gained = total.minus(self._last)
        window = Window(
            start=self._last_at,
            end=now,
            tokens=total.minus(self._base).total("emitted"),
            domains={d: counts for d in gained.tag_values("domain") if (counts := counts_of(gained, d)).steps},
            version=version,
        )
        self._last, self._last_at = total, now
        return window


def counts_of(counters: Counters, domain: str | None) -> DomainCounts:
    """Of one domain, or of all."""
    names = ("accepted", "tested", "drafted", "steps", "emitted")
    return DomainCounts(*(counters.total(name, domain=domain) for name in names))


def tokens_at(windows: Sequence[Window], times: Sequence[float]) -> list[float]:
    """Tokens served by each of these times (seconds since the epoch), between looks in proportion."""
    if not windows:
        return [0.0] * len(times)
    ends = [windows[0].start, *(window.end for window in windows)]
    served = [0.0, *(window.tokens for window in windows)]
    return [float(tokens) for tokens in np.interp(times, ends, served)]
