"""One learner a Redis, whatever clusters there are: the keeper's decisions over a scripted cluster and a real Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from learner.keeper import PATIENCE_S, Keeper
from learner.loop import NAME, STATUS_TTL_S
from shared.config import Config, config_from_flat
from shared.store import Store


class ScriptedActors:
    """A cluster whose actor answers when it is told to."""

    def __init__(self) -> None:
        self.running: Config | None = None
        self.answers = True
        self.log: list[str] = []

    def exists(self) -> bool:
        return self.running is not None

    def settings(self) -> Mapping[str, Any] | None:
        return self.running.to_dict() if self.running is not None and self.answers else None

    def start(self, config: Config) -> None:
        self.running = config
        self.log.append("start")

    def end(self) -> None:
        self.running = None
        self.log.append("end")


@pytest.fixture
def config(redis_url: str) -> Config:
    return config_from_flat({"redis.url": redis_url, "redis.prefix": f"test-{uuid4().hex}"})


@pytest.fixture
def store(config: Config) -> Iterator[Store]:
    store = Store(config.redis.url, config.redis.prefix)
    yield store
    store.close()


def test_a_learner_is_started_once_and_then_left_alone(config: Config) -> None:
    actors = ScriptedActors()
    keeper = Keeper(config, actors)
    for _ in range(3):
        keeper.tend()
    assert (actors.log, keeper.state) == (["start"], "runs")


def test_a_keeper_that_was_moved_adopts_the_learner_that_runs(config: Config) -> None:
    actors = ScriptedActors()
    actors.running = config
    Keeper(config, actors).tend()
    assert actors.log == []


def test_other_settings_replace_it(config: Config) -> None:
    actors = ScriptedActors()
    actors.running = config
    changed = replace(config, learner=replace(config.learner, learning_rate=1e-4))
    keeper = Keeper(changed, actors)
    keeper.tend()
    keeper.tend()
    assert (actors.log, actors.running) == (["end", "start"], changed)


def test_a_second_cluster_waits_until_the_first_ones_heartbeat_is_gone(config: Config, store: Store) -> None:
    store.put_status(NAME, {"state": "reading traces"}, ttl_s=STATUS_TTL_S)
    actors = ScriptedActors()
    keeper = Keeper(config, actors)
    keeper.tend()
    assert actors.log == []
    assert "heartbeat" in keeper.state
    store.put_status(NAME, {"state": "leaving"}, ttl_s=1)
    while NAME in store.statuses():
        time.sleep(0.1)  # for the second above
    keeper.tend()
    assert actors.log == ["start"]


def test_nothing_is_started_while_redis_is_away(config: Config) -> None:
    away = replace(config, redis=replace(config.redis, url="redis://127.0.0.1:1/0"))
    actors = ScriptedActors()
    keeper = Keeper(away, actors)
    keeper.tend()
    assert actors.log == []
    assert keeper.state.startswith("waiting: Redis")


def test_a_learner_that_is_switched_off_is_ended(config: Config) -> None:
    actors = ScriptedActors()
    actors.running = config
    keeper = Keeper(replace(config, learner=replace(config.learner, enabled=False)), actors)
    keeper.tend()
    keeper.tend()
    assert (actors.log, keeper.state) == (["end"], "off")


def test_silence_is_borne_for_a_while(config: Config) -> None:
    """A node for the learner takes minutes to come, and settings that never find one must not block new ones."""
    now = 0.0
    actors = ScriptedActors()
    actors.running, actors.answers = config, False
    keeper = Keeper(config, actors, clock=lambda: now)
    for now in (1.0, PATIENCE_S / 2, PATIENCE_S):  # noqa: B007 - the clock reads it
        keeper.tend()
    assert actors.log == []
    now = PATIENCE_S + 2
    keeper.tend()
    keeper.tend()
    assert actors.log == ["end", "start"]
