"""Feeds a metrics library from samples: counters and histograms by what came since the last time, gauges as they are.

Owns the last values, and the instruments, which `make` builds when they are first needed. A library's counters cannot
be set, and none of them can be given a zero. A drafter version that is served no more goes to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shared.metrics import Buckets, Metric, Sample

Record = Callable[[float, dict[str, str]], None]  # adds, sets or observes a value under these labels
Make = Callable[[Metric], Record]


class Meters:
    """Called by one thread."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._instruments: dict[str, Record] = {}
        self._last: dict[tuple[str, str], float | Buckets] = {}
        self._gauges: dict[tuple[str, str], Metric] = {}  # shown the last time

    def show(self, samples: Iterable[Sample]) -> None:
        """`samples` are cumulative, and all that there are now."""
        gauges = {}
        for sample in samples:
            metric, value = sample.metric, sample.value
            key = metric.name, sample.label
            if isinstance(value, Buckets):
                self._observe(sample, value)
            elif metric.kind == "counter":
                last = self._last.get(key, 0.0)
                assert isinstance(last, float), "a metric does not change its kind"
                if value > last:
                    self._record(metric, sample.label, value - last)
            else:
                gauges[key] = metric
                self._record(metric, sample.label, value)
            self._last[key] = value
        for (_, label), metric in ((key, metric) for key, metric in self._gauges.items() if key not in gauges):
            self._record(metric, label, 0.0)
        self._gauges = gauges

    def _observe(self, sample: Sample, now: Buckets) -> None:
        """Each new value as its bucket's bound: the library keeps counts of buckets only."""
        metric = sample.metric
        last = self._last.get((metric.name, sample.label), Buckets((0.0,) * len(now.counts), 0.0))
        assert isinstance(last, Buckets), "a metric does not change its kind"
        for bound, count, before in zip((*metric.bounds, 2 * metric.bounds[-1]), now.counts, last.counts, strict=True):
            for _ in range(int(count - before)):
                self._record(metric, sample.label, bound)

    def _record(self, metric: Metric, label: str, value: float) -> None:
        if metric.name not in self._instruments:
            self._instruments[metric.name] = self._make(metric)
        self._instruments[metric.name](value, {metric.label: label} if metric.label else {})
