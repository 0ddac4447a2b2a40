"""The arithmetic of an experiment: α of each arm, how fast the online drafter recovers, what it forgets.

α of a set of records is acceptances over committed positions. Intervals are 95 % percentiles of a bootstrap that draws
whole requests within their domain, because positions of one request are not independent; two arms are compared on the
same draws. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.intervals import Interval

RESAMPLES = 2000
WITHIN = 0.03  # of the drafter that was distilled on all data; and as much may be forgotten
_WINDOW_SHARE, _LEAST_WINDOW, _MOST_WINDOW = 5, 8, 60

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recovery:
    """Tokens generated after the start of a domain until α is within reach; None: not while the domain lasted."""

    tokens: float | None
    low: float | None
    high: float | None
    window: int  # records that are averaged over


@dataclass(frozen=True)
class Memory:
    """α of a domain when it was served best, and at the end of the stream, on records that nobody learnt from."""

    peak: float
    end: float
    lost: Interval  # peak - end
    records: int


class Draws:
    """How often each request of a domain is drawn, [resamples, requests]: the same for every arm."""

    def __init__(self, requests: Sequence[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.by_domain = [rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64) for n in requests]

    def ratio(self, over: Sequence[Floats], under: Sequence[Floats], domains: Sequence[int]) -> Interval:
        """Of sums over the given domains: `over` and `under` hold a number for each request of each domain."""
        top = sum(self.by_domain[d] @ over[d] for d in domains)
        bottom = sum(self.by_domain[d] @ under[d] for d in domains)
        value = _over(sum(over[d].sum() for d in domains), sum(under[d].sum() for d in domains))
        return _interval(float(value), _over(top, bottom))


def recovery(
    online: Floats,  # [n] acceptances of the requests of one domain, in order
    reference: Floats,  # [n]
    positions: Floats,  # [n]
    tokens: Floats,  # [n] generated
    weights: Floats,  # [resamples, n]
) -> Recovery:
    """The first run of requests over which `online` is at most WITHIN below; counted to its middle, and 0 if the very
    first run is one."""
    n = len(online)
    window = min(max(n // _WINDOW_SHARE, min(_LEAST_WINDOW, n)), _MOST_WINDOW)
    before = np.concatenate([[0.0], np.cumsum(tokens)])
    reached = before[np.arange(n - window + 1) + window // 2]
    reached[0] = 0.0
    found, drawn = (
        _first(_runs(w * (reference - online), window), _runs(w * positions, window), reached)
        for w in (np.ones((1, n)), weights)
    )
    low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
    return Recovery(_reached(found[0]), _reached(low), _reached(high), window)


def memory(versions: Mapping[str, Floats], last: str, seed: int) -> Memory:
    """`versions` holds [records, 2] (acceptances, positions) of all that served the domain, and of the last one.

    The best version is chosen on one half of the records and measured on the other, both ways: the largest of several
    noisy numbers is larger than what it stands for.
    """
    end = versions[last]
    halves = np.arange(len(end)) % 2
    best = np.zeros_like(end)
    for half in (0, 1):
        name = max(versions, key=lambda v: float(_over(*versions[v][halves == half].sum(0))))
        best[halves != half] = versions[name][halves != half]
    lost = Draws([len(end)], seed).ratio([best[:, 0] - end[:, 0]], [end[:, 1]], [0])
    return Memory(float(_over(*best.sum(0))), float(_over(*end.sum(0))), lost, len(end))


def _reached(tokens: float) -> float | None:
    return None if np.isinf(tokens) else float(tokens)


def _first(over: Floats, under: Floats, reached: Floats) -> Floats:  # [r, runs] -> [r]
    good = _over(over, under) <= WITHIN
    return np.where(good.any(1), reached[good.argmax(1)], np.inf)


def _runs(values: Floats, window: int) -> Floats:  # [r, n] -> [r, n - window + 1]
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return np.asarray(sums[:, window:] - sums[:, :-window])


def _interval(value: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _over(numerator: Floats | float, denominator: Floats | float) -> Floats:
    """Nothing tested counts as nothing accepted."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)
