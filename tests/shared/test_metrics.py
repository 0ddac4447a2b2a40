"""What is exported: every counter has its metric, every metric a source, and no label grows without a bound."""

from __future__ import annotations

import re

import pytest

from shared.metrics import (
    GAMMA_BOUNDS,
    LEARNER_METRICS,
    SERVING_METRICS,
    Buckets,
    Metric,
    learner_samples,
    serving_samples,
    unknown_fields,
)
from tests.fakes import COUNTERS

STATUS = {
    "running": 1,
    "waiting": 2,
    "blocks_free": 16,
    "blocks_total": 64,
    "trace_queue": 3,
    "drafter_version": "v7",
    "target": "ab12:fp16",
}
LEARNER = {
    "at": 1000.5,
    "number": 4,
    "fresh_tokens": 900,
    "drift": {"sql": 1.5},
    "counters": {
        "decisions.promoted": 2.0,
        "decisions.refused": 3.0,
        "traces_stored": 8.0,
        "traces_dead": 1.0,
        "replicas_late": 1.0,
        "attempts_failed": 1.0,
        "features_recomputed": 5.0,
    },
}


def serving() -> dict[tuple[str, str], float | Buckets]:
    return {(sample.metric.name, sample.label): sample.value for sample in serving_samples(COUNTERS, STATUS)}


def test_every_counter_of_a_replica_is_shown_and_every_metric_has_a_source() -> None:
    assert unknown_fields(COUNTERS) == set()
    assert unknown_fields({"novelty|domain=sql": 1.0, "steps": 1.0}) == {"novelty"}
    assert {name for name, _ in serving()} == {metric.name for metric in SERVING_METRICS}
    assert {sample.metric for sample in learner_samples(LEARNER)} == set(LEARNER_METRICS)


@pytest.mark.parametrize("metric", SERVING_METRICS + LEARNER_METRICS, ids=lambda metric: metric.name)
def test_a_metric_can_be_shown_by_any_library(metric: Metric) -> None:
    assert re.fullmatch("redraft_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")  # Prometheus' convention
    assert bool(metric.bounds) == (metric.kind == "histogram")
    assert all(bound > 0 for bound in metric.bounds)  # Ray's replica dies of a bound of 0
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert metric.label not in ("replica", "deployment", "application", "version") or metric.kind == "gauge"
    assert metric.help


def test_versions_are_added_up_because_they_never_end() -> None:
    found = serving()
    assert found["redraft_spec_decode_num_drafts_total", "sql"] == 8.0  # 4 of base and 4 of v1
    assert found["redraft_spec_decode_num_accepted_tokens_total", "sql"] == 15.0  # 6 + 9
    assert [name for name, label in found if label == "v1"] == []
    assert found["redraft_drafter_info", "v7"] == 1.0


def test_positions_count_from_0_as_everywhere() -> None:
    found = serving()
    assert found["redraft_spec_decode_num_accepted_tokens_per_pos_total", "0"] == 7.0
    assert found["redraft_tested_tokens_per_pos_total", "1"] == 7.0


def test_a_histogram_keeps_counts_and_sum() -> None:
    gamma = serving()["redraft_gamma", ""]
    assert isinstance(gamma, Buckets)
    filled = {bound: count for bound, count in zip(GAMMA_BOUNDS, gamma.counts, strict=False) if count}
    assert filled == {0.5: 2.0, 3.0: 4.0, 4.0: 4.0}  # plain steps lie below 0.5
    assert gamma.total == 28.0  # drafted: 4 * 3 + 4 * 4
    token = serving()["redraft_inter_token_latency_seconds", ""]
    assert isinstance(token, Buckets)
    assert (sum(token.counts), token.counts[-1], token.total) == (22.0, 2.0, 6.5)


def test_the_share_of_taken_blocks_stands_beside_what_it_is_made_of() -> None:
    found = serving()
    assert found["redraft_kv_usage_ratio", ""] == 0.75  # 48 of 64
    assert (found["redraft_kv_blocks", ""], found["redraft_kv_blocks_free", ""]) == (64.0, 16.0)


def test_the_learner_says_what_became_of_attempts_and_traces() -> None:
    found = {(sample.metric.name, sample.label): sample.value for sample in learner_samples(LEARNER)}
    assert found["redraft_gate_decisions_total", "refused"] == 3.0
    assert found["redraft_learner_traces_total", "dead"] == 1.0
    assert found["redraft_learner_heartbeat_timestamp_seconds", ""] == 1000.5
    assert list(learner_samples({})) == []
