"""Paired ratios of throughput with a 95 % interval, by a bootstrap over prompts and repeats.

A pair is the same group of prompts, answered by two contenders in the same repeat, one shortly after the other: what
differs between prompts, or drifts in the machine, is in both. The ratio is the median over pairs. Groups are drawn
with replacement, then repeats within each, because repeats of one prompt are more alike than prompts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.bench_line_up import Comparison
from ops.bench_run import Result
from shared.intervals import Interval

RESAMPLES = 2000
CONFIDENCE = 0.95
ALL = "all"  # the domains together


@dataclass(frozen=True)
class Ratio:
    """Tokens a second of one over those of another."""

    numerator: str
    denominator: str
    batch: int
    domain: str
    ratio: float
    low: float
    high: float
    pairs: int


def paired_ratios(results: Sequence[Result], comparisons: Sequence[Comparison], *, seed: int) -> list[Ratio]:
    """One for each comparison, batch and domain that both have answered, and for all domains together."""
    found = []
    for comparison in comparisons:
        for batch, domain in spots(results):
            above, below = (of(results, name, batch, domain) for name in (comparison.numerator, comparison.denominator))
            grid = pair_grid(above, below, lambda a, b: a.measure.tok_s / b.measure.tok_s)
            if grid is None:
                continue
            interval = bootstrap(grid, lambda drawn: np.median(drawn, axis=1), seed=seed)
            found.append(
                Ratio(
                    comparison.numerator,
                    comparison.denominator,
                    batch,
                    domain,
                    interval.value,
                    interval.low,
                    interval.high,
                    grid.size,
                )
            )
    return found


def spots(results: Sequence[Result]) -> list[tuple[int, str]]:
    """Every (batch, domain), and (batch, ALL) where there are several domains."""
    batches = list(dict.fromkeys(result.batch for result in results))
    domains = list(dict.fromkeys(result.domain for result in results))
    return [(batch, domain) for batch in batches for domain in [*domains, *([ALL] if len(domains) > 1 else [])]]


def of(results: Sequence[Result], contender: str, batch: int, domain: str) -> list[Result]:
    return [
        result
        for result in results
        if result.contender == contender and result.batch == batch and domain in (ALL, result.domain)
    ]


def pair_grid(
    above: Sequence[Result], below: Sequence[Result], value: Callable[[Result, Result], float]
) -> NDArray[np.float64] | None:  # [groups, repeats]
    """The value of each pair. Repeats that some group lacks (a contender left) are left out; None without any."""
    partners = {_key(result): result for result in below}
    by_group: dict[tuple[str, int], dict[int, float]] = {}
    for result in above:
        partner = partners.get(_key(result))
        if partner is not None:
            by_group.setdefault((result.domain, result.unit), {})[result.repeat] = value(result, partner)
    shared = set.intersection(*(set(values) for values in by_group.values())) if by_group else set()
    if not shared:
        return None
    return np.array([[values[repeat] for repeat in sorted(shared)] for values in by_group.values()])


def bootstrap(
    grid: NDArray[np.float64],  # [groups, repeats]
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],  # [draws, pairs] -> [draws]
    *,
    seed: int,
) -> Interval:
    """The statistic over all pairs, and its percentile interval."""
    value = float(statistic(grid.reshape(1, -1))[0])
    drawn = grid[draws(grid.shape[0], grid.shape[1], seed)]
    low, high = np.quantile(statistic(drawn.reshape(len(drawn), -1)), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def draws(groups: int, repeats: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices into [groups, repeats], each [RESAMPLES, groups, repeats]."""
    random = np.random.default_rng(seed)
    chosen = random.integers(0, groups, (RESAMPLES, groups, 1))
    return np.broadcast_to(chosen, (RESAMPLES, groups, repeats)), random.integers(
        0, repeats, (RESAMPLES, groups, repeats)
    )


def _key(result: Result) -> tuple[str, int, int]:
    return result.domain, result.unit, result.repeat
