"""The two ways on which metrics leave: as text for whoever asks the service, and through Ray's export for the cluster.

Both read cumulative counters that are there anyway, so neither is on the way of a token. Ray keeps of a histogram only
how many values each bucket holds, so its `_sum` is an estimate from the buckets' middles; in the text it is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.ticker import Ticker
from shared.meters import Meters, Record
from shared.metrics import Buckets, Metric, Sample

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
EVERY_S = 5.0  # Ray forgets a gauge that is not told again within twice its own interval of ten seconds

_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

log = logging.getLogger(__name__)


def text_of(parts: Iterable[tuple[str, Iterable[Sample]]]) -> bytes:
    """Prometheus' text format of (replica, its samples); what is no replica's has an empty name and no such label."""
    families: dict[str, Any] = {}
    for replica, samples in parts:
        for sample in samples:
            metric, value = sample.metric, sample.value
            names = [*(["replica"] if replica else []), *([metric.label] if metric.label else [])]
            labels = [*([replica] if replica else []), *([sample.label] if metric.label else [])]
            if metric.name not in families:
                families[metric.name] = _FAMILIES[metric.kind](metric.name, metric.help, labels=names)
            family = families[metric.name]
            if isinstance(value, Buckets):
                family.add_metric(labels, _cumulative(metric, value), value.total)
            else:
                family.add_metric(labels, value)
    return generate_latest(_Collected(families.values()))


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _cumulative(metric: Metric, buckets: Buckets) -> list[tuple[str, float]]:
    so_far, found = 0.0, []
    for bound, count in zip((*metric.bounds, float("inf")), buckets.counts, strict=True):
        so_far += count
        found.append(("+Inf" if bound == float("inf") else str(bound), so_far))
    return found


class RayExport:
    """Shows a replica's samples to Ray, in a thread of its own, which must be one of a Serve replica: `ticker`."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read, self._meters = read, Meters(_serve_instrument)
        self.ticker = Ticker("metrics", self._show, every_s=EVERY_S, at_once=True)

    def _show(self) -> None:
        try:
            self._meters.show(self._read())
        except Exception:  # whatever it is, serving does not depend on it
            log.exception("metrics were not shown to Ray")


def _serve_instrument(metric: Metric) -> Record:
    from ray.serve import metrics

    labels: Any = (metric.label,) if metric.label else ()  # Ray's hints know of tuples of one only
    if metric.kind == "counter":
        return metrics.Counter(metric.name, metric.help, labels).inc
    if metric.kind == "gauge":
        return metrics.Gauge(metric.name, metric.help, labels).set
    return metrics.Histogram(metric.name, metric.help, list(metric.bounds), labels).observe
