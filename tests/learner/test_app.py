"""The learner as a Ray actor: found by name, fed through the object store, and back after its process has died."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from learner.app import ACTOR, NAMESPACE, start
from shared.errors import Declined
from shared.store import Store
from tests.learner.traffic import TinyServing
from tests.ray_export import wait_for


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 180.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def test_the_actor_lives_on_through_the_death_of_its_process(ray_cluster: None, redis_url: str, tmp_path: Path) -> None:
    import ray

    serving = TinyServing(tmp_path)
    config = replace(serving.config, redis=replace(serving.config.redis, url=redis_url, prefix=f"test-{uuid4().hex}"))
    store = Store(config.redis.url, config.redis.prefix)
    actor = start(config)
    try:
        assert start(config)._actor_id == actor._actor_id, "there is one learner a cluster"
        by_name = ray.get_actor(ACTOR, namespace=NAMESPACE)
        until(lambda: "champion" in _state(by_name))
        store.orders.ask("pause")
        for item in serving.serve(6):
            ray.get(by_name.features.remote(item.record.id, ray.put(item.features)))
            store.append_trace(item.data, max_bytes=2**26)
        until(lambda: len(ray.get(by_name.measurements.remote(0))) == 6)
        assert _state(by_name)["counters"].get("features_recomputed", 0) == 0
        found = wait_for({"redraft_learner_heartbeat_timestamp_seconds", "redraft_learner_traces"})
        beat = max(sample.value for sample in found["redraft_learner_heartbeat_timestamp_seconds"].samples)
        assert abs(time.time() - beat) < 120.0  # seconds since the epoch, and not long ago
        with pytest.raises(Declined, match="no version before base"):
            store.orders.ask("rollback", reason="nothing to undo")

        for item in serving.serve(4):
            store.append_trace(item.data, max_bytes=2**26)  # its features die with the actor
        ray.kill(actor, no_restart=False)
        until(lambda: len(_measurements(by_name)) == 10)
        until(lambda: _state(by_name)["counters"].get("features_recomputed", 0) >= 1)
        orders = [row["order"] for row in _measurements(by_name)]
        assert orders == sorted(set(orders))
        assert store.stream_depth().pending == 0
    finally:
        ray.kill(actor)
        store.close()


def _state(actor: Any) -> dict[str, Any]:
    return _asked(lambda: actor.state.remote(), {"counters": {}})  # type: ignore[no-any-return]


def _measurements(actor: Any) -> list[dict[str, Any]]:
    return _asked(lambda: actor.measurements.remote(0), [])  # type: ignore[no-any-return]


def _asked(question: Callable[[], Any], otherwise: Any) -> Any:
    """The answer, or something else while the actor is between two lives."""
    import ray

    try:
        return ray.get(question(), timeout=20)
    except ray.exceptions.RayError:
        return otherwise
