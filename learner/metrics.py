"""The learner's heartbeat as Ray's metrics, which Ray exports with those of everything else on the node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from shared.meters import Meters, Record
from shared.metrics import Metric, learner_samples

log = logging.getLogger(__name__)


class RayMetrics:
    """Told of each heartbeat by the learner's own thread: a heartbeat that stands still is one that is not told."""

    def __init__(self) -> None:
        self._meters = Meters(_instrument)

    def show(self, status: Mapping[str, Any]) -> None:
        try:
            self._meters.show(learner_samples(status))
        except Exception:  # whatever it is, learning does not depend on it
            log.exception("metrics were not shown to Ray")


def _instrument(metric: Metric) -> Record:
    labels = (metric.label,) if metric.label else ()
    if metric.kind == "counter":
        return metrics.Counter(metric.name, metric.help, labels).inc
    return metrics.Gauge(metric.name, metric.help, labels).set
