"""The wish for replicas, as a function of what Serve's controller shows it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from serving.scaling import FULL, KV_USAGE, by_requests_and_tokens, kv_usage


def wish(requests: float, usage: list[float] | None, target: float = 8) -> float:
    context = SimpleNamespace(
        config=AutoscalingConfig(max_replicas=100, target_ongoing_requests=target),
        total_num_requests=requests,
        aggregated_metrics=None if usage is None else {KV_USAGE: dict(enumerate(usage))},
    )
    wished, state = by_requests_and_tokens(context)
    assert state == {}
    return wished


def test_requests_that_run_or_wait_are_spread_over_replicas() -> None:
    assert wish(40, [0.1, 0.1]) == 5  # 40 / 8
    assert wish(0, [0.0]) == 0  # the lower bound is Serve's business


def test_long_contexts_ask_for_replicas_though_there_are_few_requests() -> None:
    assert wish(2, [FULL, FULL]) == pytest.approx(2)  # just right
    assert wish(2, [1.0, 1.0]) == pytest.approx(2 / FULL)  # more than there are


def test_a_replica_that_has_not_reported_yet_holds_nothing() -> None:
    assert wish(16, None) == 2


def test_the_share_of_taken_blocks() -> None:
    assert kv_usage(SimpleNamespace(blocks_free=25, blocks_total=100)) == 0.75
    assert kv_usage(SimpleNamespace(blocks_free=0, blocks_total=0)) == 0.0  # before the cache is there


def test_serve_can_carry_the_policy_to_its_controller() -> None:
    policy = AutoscalingPolicy(policy_function="serving.scaling:by_requests_and_tokens")
    context = SimpleNamespace(
        config=AutoscalingConfig(target_ongoing_requests=8), total_num_requests=8, aggregated_metrics={}
    )
    assert policy.get_policy()(context) == (1, {})
