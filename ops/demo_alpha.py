"""The arithmetic of the demo's claim: live and static drafter on the same committed positions.

α of a set of requests is sum / sum over all their committed positions; intervals come from a bootstrap that draws whole
requests, because positions of one request are not independent. Pure functions over the learner's measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
LAST_SHARE = 1 / 3  # of a domain's requests
_RESAMPLES_AT_ONCE = 250  # bounds the memory of a long run

Interval = tuple[float, float]
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # [n, columns] sums -> [n]


@dataclass(frozen=True)
class Measurement:
    """One request, judged by the learner before it was trained on. Sums over its committed positions."""

    order: int
    domain: str
    finished_at: float  # seconds since the epoch
    version: str  # of the drafter that served it
    seeded: bool
    positions: int
    live_sum: float  # acceptance of the version that served it, summed over all positions
    static_sum: float  # of the drafter that the demo started with
    live_expected_accepted: float  # by replay, had that version drafted every round
    live_expected_tested: float
    static_expected_accepted: float
    static_expected_tested: float
    rounds_accepted: float  # expected of the rounds that served it; 0 when several versions drafted them
    rounds_tested: float
    accepted: float  # counted while it was served
    tested: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Measurement:
        """From a row of the learner's, which may carry more."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def since_cut(finished: Sequence[float], share: float = LAST_SHARE) -> float:
    """The finish time at which the last `share` of these requests begins; infinity when there are none."""
    ordered = sorted(finished)
    return ordered[int(len(ordered) * (1 - share))] if ordered else float("inf")


def last_third(
    measurements: Sequence[Measurement], finished: Mapping[str, Sequence[float]], domains: Sequence[str]
) -> dict[str, list[Measurement]]:
    """The measured ones among the last third of each domain's requests.

    `finished` are the finish times of all its requests as their client saw them: the third is one of the requests
    that were sent, not of those that happened to be measured.
    """
    cuts = {domain: since_cut(finished.get(domain, ())) for domain in domains}
    return {
        domain: [m for m in measurements if m.domain == domain and m.finished_at >= cuts[domain] and not m.seeded]
        for domain in domains
    }


def live_alpha(measurements: Sequence[Measurement]) -> float | None:
    return ratio(sum(m.live_sum for m in measurements), sum(m.positions for m in measurements))


def static_alpha(measurements: Sequence[Measurement]) -> float | None:
    return ratio(sum(m.static_sum for m in measurements), sum(m.positions for m in measurements))


def gain_interval(groups: Sequence[Sequence[Measurement]], *, seed: int = 0) -> Interval | None:
    """95 % interval of live minus static α over all groups together; None without two requests in some group.

    Requests are drawn within their group (a drifted domain), since how many of each there are is no accident.
    """
    rows = [np.array([(m.live_sum, m.static_sum, m.positions) for m in group]).reshape(-1, 3) for group in groups]
    return _bootstrap(rows, lambda sums: _over(sums[:, 0] - sums[:, 1], sums[:, 2]), seed)


@dataclass(frozen=True)
class Agreement:
    """α as counted while serving beside the live drafter's estimate on the same requests."""

    accepted: float
    tested: float
    expected_accepted: float  # of the very rounds that served these requests
    expected_tested: float
    difference_ci95: Interval | None  # counted minus expected α


def agreement(measurements: Sequence[Measurement], *, seed: int = 0) -> Agreement:
    """Over the unseeded ones: a seeded request accepts by coupling, a little less often than the estimate says.

    The estimate is of the very rounds that were served, with their starts and gammas; a request whose drafter was
    exchanged on the way is left out.
    """
    rows = np.array(
        [
            (m.accepted, m.tested, m.rounds_accepted, m.rounds_tested)
            for m in measurements
            if not m.seeded and m.tested and m.rounds_tested
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    interval = _bootstrap([rows], _difference, seed)
    accepted, tested, expected_accepted, expected_tested = (float(total) for total in rows.sum(0))
    return Agreement(accepted, tested, expected_accepted, expected_tested, interval)


def _difference(sums: NDArray[np.float64]) -> NDArray[np.float64]:  # [n, 4] -> [n]
    return _over(sums[:, 0], sums[:, 1]) - _over(sums[:, 2], sums[:, 3])


def _bootstrap(groups: Sequence[NDArray[np.float64]], statistic: Statistic, seed: int) -> Interval | None:
    """Percentile interval of `statistic` of the summed rows, requests drawn with replacement within each group."""
    groups = [rows for rows in groups if len(rows)]
    if not any(len(rows) > 1 for rows in groups):
        return None
    rng = np.random.default_rng(seed)
    found: list[NDArray[np.float64]] = []
    for first in range(0, RESAMPLES, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, RESAMPLES - first)
        sums = sum(rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=size) @ rows for rows in groups)
        found.append(statistic(np.asarray(sums)))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)


def _over(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """Nothing tested counts as nothing accepted."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
