"""A histogram kept as cumulative counters (law 10), so that it travels and adds up as they do.

Fields are `NAME_le.BOUND`, how many values lie in the bucket that ends with this bound (`inf` is the open one; a bucket
does not hold the ones below it), and `NAME_s`, what all values add up to. Used from one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shared.counters import Counters


class Histogram:
    """`bounds` ascend and are above 0."""

    def __init__(self, name: str, bounds: Sequence[float], counters: Counters) -> None:
        self._bounds, self._counters = bounds, counters
        self._fields = [f"{name}_le.{bound:g}" for bound in (*bounds, float("inf"))]
        self._total = f"{name}_s"

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counters.add(self._fields[bisect_left(self._bounds, seconds)], times)
        self._counters.add(self._total, seconds * times)
