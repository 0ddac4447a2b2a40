"""A histogram is a handful of cumulative counters: each value in exactly one of them, and their sum."""

from __future__ import annotations

from shared.counters import Counters
from shared.histogram import Histogram


def test_a_value_is_counted_once_in_the_bucket_that_ends_at_or_above_it() -> None:
    counters = Counters()
    histogram = Histogram("wait", (0.5, 2.0), counters)
    for seconds in (0.25, 0.5, 0.75, 2.0, 3.0):  # 0.5 and 2.0 are bounds, and belong to the buckets that they end
        histogram.observe(seconds)
    assert counters.fields == {"wait_le.0.5": 2, "wait_le.2": 2, "wait_le.inf": 1, "wait_s": 6.5}


def test_a_value_may_count_for_several() -> None:
    counters = Counters()
    Histogram("wait", (1.0,), counters).observe(0.25, times=4)
    assert counters.fields == {"wait_le.1": 4, "wait_s": 1.0}
