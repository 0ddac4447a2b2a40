"""What goes on, and what is not lost, where Redis dies, the disk is full, or the learner is killed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.database import Database
from learner.example import Example
from learner.loop import LearnerLoop
from learner.schedule import Progress
from learner.shelf import Shelf
from ops.erase import erase
from ops.local_redis import find_server, launch_server
from ops.processes import Supervisor
from shared.config import Config
from shared.store import Store
from tests.learner.loops import configured, running, until
from tests.learner.traffic import Served, TinyServing


def test_redis_may_die_and_come_back_empty(serving: TinyServing, tmp_path: Path) -> None:
    with Supervisor(tmp_path / "redis") as supervisor:
        url = launch_server(supervisor, find_server(), maxmemory=128 * 2**20)
        config = configured(serving, tmp_path / "home", url)
        store = Store(url, config.redis.prefix)
        with running(config) as loop:
            published: list[Served] = []

            def traffic() -> None:
                published.extend(serving.publish(store, loop.inbox, 8))

            until(lambda: loop.status.get("promotions"), meanwhile=traffic)
            loop.pause()
            until(lambda: loop.status["state"] == "paused", meanwhile=traffic)
            until(lambda: loop.status["counters"]["traces_stored"] == len(published))
            champion = store.champion()
            supervisor.children[0].process.kill()
            supervisor.children[0].process.wait()
            until(lambda: any("Redis" in said for said in loop.status["trouble"]))
            until(supervisor.revive)
            until(lambda: loop.status["trouble"] == [] or not any("Redis" in said for said in loop.status["trouble"]))
            until(lambda: store.champion() == champion)
            assert champion is not None
            assert store.get_blob(champion.blob) is not None
            count = len(loop.measurements(0))
            serving.publish(store, loop.inbox, 2)
            until(lambda: len(loop.measurements(0)) == count + 2)
        store.close()


def test_stopping_in_the_middle_of_an_attempt_is_quick_and_it_is_made_again(
    serving: TinyServing, tmp_path: Path, redis_url: str
) -> None:
    config = configured(serving, tmp_path, redis_url, gate__min_requests=10**6)
    store = Store(config.redis.url, config.redis.prefix)
    with running(config) as loop:
        until(lambda: "waiting for" in loop.status["state"], meanwhile=lambda: serving.publish(store, loop.inbox, 8))
        started = time.monotonic()
    assert time.monotonic() - started < 30
    again = LearnerLoop(config)
    again.pause()
    with running(config, loop=again) as loop:
        until(lambda: "refusals" in loop.status)
        assert (loop.status["refusals"], loop.status["attempts"]) == (0, 1)
        assert loop.status["state"] == "paused"
        assert loop.status["fresh_tokens"] >= config.learner.min_fresh_tokens, "nothing of it was used up"
        loop.resume()
        until(lambda: "attempt 1: waiting for" in loop.status["state"])
        assert loop.status["attempts"] == 1, "the same one"
    store.close()


def test_an_erasure_ends_the_attempt_that_its_data_are_in(serving: TinyServing, tmp_path: Path, redis_url: str) -> None:
    config = configured(serving, tmp_path, redis_url, gate__min_requests=10**6)
    store = Store(config.redis.url, config.redis.prefix)
    with running(config) as loop:
        until(lambda: "waiting for" in loop.status["state"], meanwhile=lambda: serving.publish(store, loop.inbox, 8))
        receipt = erase(store, "default", 60.0)
        assert receipt is not None
        assert receipt["records"] > 0
        until(lambda: loop.status["decision"] == "kept: default was erased during the attempt")
        assert loop.status["refusals"] == 0, "it says nothing about the drafter"
        assert loop.status["fresh_tokens"] == 0
        assert not any(loop.status["kept"].values())
    store.close()


def test_on_a_full_disk_the_learner_waits_counts_says_so_and_loses_nothing(
    serving: TinyServing, loop_config: Config, loop_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    run = Database.run

    def no_room(self: Database, sql: str, *values: Any) -> Any:
        if sql.startswith("INSERT"):
            raise full
        return run(self, sql, *values)

    with running(loop_config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        with monkeypatch.context() as patch:
            patch.setattr(Database, "run", no_room)
            served = serving.publish(loop_store, loop.inbox, 8)
            until(lambda: any("disk is full" in said for said in loop.status["trouble"]))
            until(lambda: loop.status["counters"].get("disk_failures", 0) >= 2)
            assert loop_store.stream_depth().pending + loop_store.stream_depth().lag == len(served)
            assert loop.measurements(0) == []
        until(lambda: len(loop.measurements(0)) == len(served))
        until(lambda: not any("disk" in said for said in loop.status["trouble"]))
        assert loop_store.stream_depth().pending == 0


@pytest.mark.parametrize(
    "moment", ["redis", pytest.param("shelf", marks=pytest.mark.slow), pytest.param("progress", marks=pytest.mark.slow)]
)
def test_a_kill_around_the_promotion_neither_loses_it_nor_makes_it_twice(
    serving: TinyServing, loop_config: Config, loop_store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed before the shelf knows the version, after it, or with Redis at it too: the attempt counts once."""

    class Killed(BaseException):
        """Nothing catches it."""

    owner, name = {"shelf": (Shelf, "put"), "redis": (Store, "set_champion"), "progress": (Progress, "ended")}[moment]
    real = getattr(owner, name)

    def die(self: Any, *given: Any, **settings: Any) -> Any:
        if name != "ended" or given[0] == "promoted":
            raise Killed
        return real(self, *given, **settings)

    def judged_on(examples: Sequence[Example]) -> Sequence[Example]:
        serving.publish(loop_store, loop.inbox, 16)  # what the gate waits for comes while it trains
        return examples

    loop = LearnerLoop(loop_config, prepare=judged_on)
    loop._journal.start()

    def learn() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            serving.publish(loop_store, loop.inbox, 8)
            loop.step()

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            learn()
    assert loop._parts is not None
    number = loop._parts.progress.attempts
    loop._parts.database.close()
    with running(loop_config) as again:
        until(lambda: again.status.get("promotions"))
        until(lambda: loop_store.champion() is not None)
        assert again.status["champion"] == "v1"
        assert (again.status["attempts"], again.status["promotions"]) == (number, 1)
        champion = loop_store.champion()
        assert champion is not None
        assert (champion.version, champion.number) == ("v1", 1)
