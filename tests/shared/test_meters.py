"""A metrics library gets what came, once, whatever is shown to it in between."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shared.meters import Meters, Record
from shared.metrics import Metric, serving_samples

Recorded = Counter[tuple[str, str, float]]


def library(recorded: Recorded) -> Any:
    def make(metric: Metric) -> Record:
        def record(value: float, labels: dict[str, str]) -> None:
            recorded[metric.name, labels.get(metric.label, ""), value] += 1

        return record

    return make


def show(meters: Meters, recorded: Recorded, counters: dict[str, float], **status: Any) -> Recorded:
    """What one showing has recorded."""
    recorded.clear()
    meters.show(serving_samples(counters, status))
    return recorded.copy()


def test_counters_go_up_by_what_came_and_nothing_is_told_of_what_did_not() -> None:
    meters = Meters(library(recorded := Counter()))
    name = "redraft_emitted_tokens_total"
    assert show(meters, recorded, {"emitted|domain=sql": 5.0}) == {(name, "sql", 5.0): 1}
    assert show(meters, recorded, {"emitted|domain=sql": 5.0}) == {}  # libraries refuse a step of 0
    more = {"emitted|domain=sql": 7.0, "emitted|domain=chat": 1.0}
    assert show(meters, recorded, more) == {(name, "sql", 2.0): 1, (name, "chat", 1.0): 1}


def test_a_histogram_observes_each_new_value_once_inside_its_bucket() -> None:
    meters = Meters(library(recorded := Counter()))
    name = "redraft_swap_pause_seconds"
    assert show(meters, recorded, {"swap_pause_le.0.005": 2.0})[name, "", 0.005] == 2
    found = show(meters, recorded, {"swap_pause_le.0.005": 2.0, "swap_pause_le.inf": 1.0})
    assert found == {(name, "", 2.0): 1}  # above the last bound, which is 1 s


def test_a_version_that_serves_no_more_goes_to_0_once() -> None:
    meters = Meters(library(recorded := Counter()))
    name = "redraft_drafter_info"
    assert show(meters, recorded, {}, drafter_version="v1") == {(name, "v1", 1.0): 1}
    assert show(meters, recorded, {}, drafter_version="v2") == {(name, "v2", 1.0): 1, (name, "v1", 0.0): 1}
    assert show(meters, recorded, {}, drafter_version="v2") == {(name, "v2", 1.0): 1}
