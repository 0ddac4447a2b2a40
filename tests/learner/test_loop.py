"""The whole learner over a real Redis and a real MLflow store: it learns, says so, and outlives what it depends on."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from learner.base import load_base
from learner.buffer import read_measurements
from learner.database import Database
from learner.example import Example
from learner.loop import LearnerLoop
from learner.lora import LoraSettings, add_lora, export_lora
from learner.registry import CHAMPION, MODEL
from learner.schedule import Progress
from learner.shelf import Shelf
from ops.erase import erase
from ops.local_redis import find_server, launch_server
from ops.processes import Supervisor
from shared.artifact import Manifest, open_blob, pack_blob
from shared.config import Config, config_from_dict
from shared.counters import Counters
from shared.errors import Declined
from shared.live_alpha import add_request
from shared.store import Champion, Store
from tests.learner.traffic import Served, TinyServing


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("serving"))


def configured(serving: TinyServing, home: Path, redis_url: str, **changes: Any) -> Config:
    tree = serving.config.to_dict()
    tree["home"] = str(home)
    tree["redis"] |= {"url": redis_url, "prefix": f"test-{uuid4().hex}"}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section][name] = value
    return config_from_dict(tree)


@contextmanager
def running(config: Config, loop: LearnerLoop | None = None, **settings: Any) -> Iterator[LearnerLoop]:
    loop = loop or LearnerLoop(config, **settings)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(60)
        assert not thread.is_alive()


def until(
    condition: Callable[[], object], seconds: float = 120.0, meanwhile: Callable[[], object] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        meanwhile()
        time.sleep(0.05)


@pytest.fixture
def config(serving: TinyServing, tmp_path: Path, redis_url: str) -> Config:
    return configured(serving, tmp_path, redis_url)


@pytest.fixture
def store(config: Config) -> Iterator[Store]:
    found = Store(config.redis.url, config.redis.prefix)
    yield found
    found.close()


def test_it_learns_from_traffic_and_promotes_what_is_better(
    serving: TinyServing, config: Config, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)  # where a store without a server puts its artifacts
    before = mlflow.get_tracking_uri()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = replace(config, mlflow=replace(config.mlflow, tracking_uri=uri))
    counters = Counters()

    def traffic() -> None:
        for item in serving.publish(store, loop.inbox, 8):
            for round_ in item.record.rounds:
                counters.add("accepted", round_.accepted, domain="chat", version="base")
                counters.add("tested", round_.tested, domain="chat", version="base")
            counters.add("emitted", len(item.record.output_ids), domain="chat")
        store.put_counters("replica", "1", counters.fields)

    seen: list[Mapping[str, Any]] = []
    with running(config, session="first", watch=seen.append) as loop:
        until(lambda: store.champion() is not None, meanwhile=traffic)
        until(lambda: loop.status.get("promotions"), meanwhile=traffic)
        status = loop.status
        assert status["decision"].startswith("promoted: alpha")
        assert status["counters"]["traces_stored"] >= 36
        assert status["counters"]["decisions.promoted"] >= 1
        assert "promoted" in [decision["outcome"] for decision in status["decisions"]]
        assert seen[0]["at"] < seen[-1]["at"] <= time.time(), "whoever watches hears every heartbeat"
        assert store.statuses()["learner"]["state"]
        champion = store.champion()
        assert champion is not None
        blob = store.get_blob(champion.blob)
        assert blob is not None
        manifest = open_blob(blob, champion.blob).manifest
        assert manifest.parent in ("base", champion.previous)
        assert (manifest.base, champion.base) == (status["base"], status["base"])
        rows = loop.measurements(0)
        assert [row["order"] for row in rows] == sorted(row["order"] for row in rows)
        assert loop.measurements(rows[-1]["order"] + 10**6) == []
        loop.pause()
        until(lambda: loop.status["state"] == "paused", meanwhile=traffic)  # once the attempt in progress has ended
        until(lambda: loop.status["mlflow"]["waiting"] == 0)
    assert read_measurements(next(tmp_path.rglob("buffer.sqlite")), 0)[: len(rows)] == rows
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name(config.mlflow.experiment).experiment_id
    runs = {run.data.tags["redraft.kind"]: run for run in client.search_runs([experiment])}
    assert {"alpha/chat", "drift/chat", "alpha_static/chat", "drafter_version"} <= set(runs["serving"].data.metrics)
    assert runs["serving"].info.status == "FINISHED"
    attempt = runs["attempt"].data
    assert attempt.tags["redraft.decision"] in ("promoted", "refused", "undecided")
    assert {"train/loss", "train/tokens", "gate/alpha_before", "gate/alpha_after"} <= set(attempt.metrics)
    assert client.get_model_version_by_alias(MODEL, CHAMPION).tags["redraft.base"] == champion.base
    mlflow.set_tracking_uri(before)


def test_a_restart_goes_on_where_it_ended(serving: TinyServing, config: Config, store: Store) -> None:
    published: list[Served] = []

    def traffic() -> None:
        published.extend(serving.publish(store, loop.inbox, 8))

    with running(config) as loop:
        until(lambda: loop.status.get("promotions"), meanwhile=traffic)
        loop.pause()
        until(lambda: loop.status["state"] == "paused", meanwhile=traffic)
        until(lambda: loop.status["counters"]["traces_stored"] == len(published))
        first = loop.status
    with running(config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        second = loop.status
    for name in ("champion", "number", "attempts", "promotions", "decision", "decisions", "fresh_tokens", "kept"):
        assert second[name] == first[name], name
    assert second["drift"] == first["drift"]


def test_an_operator_forces_a_bad_version_and_takes_it_back(serving: TinyServing, config: Config, store: Store) -> None:
    base = load_base(config)
    assert base is not None
    drafter, settings = base.copy(), LoraSettings(rank=16, lora_alpha=32)
    add_lora(drafter, settings)
    for name, parameter in drafter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=1.0)
    noise = pack_blob(export_lora(drafter, settings, Manifest("x", base.kind, "lora", base.target, base=base.hash)))
    with running(config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        forced = Champion(**store.orders.ask("force", blob=store.put_blob(noise), reason="a drill"))
        assert store.champion() == forced
        assert (forced.version, forced.number) == ("v1", 1)
        with pytest.raises(Declined, match="ends inside its header"):
            store.orders.ask("force", blob=store.put_blob(noise[:50]), reason="a drill")
        # Requests that the bad version served measure worse than the base on the same positions.
        bad = [replace(item, record=_served_by(item.record, "v1")) for item in serving.serve(12)]
        for item in bad:
            loop.inbox.put(item.record.id, item.features)
            store.append_trace(item.data, max_bytes=2**26)
        until(lambda: len(loop.measurements(0)) == 12)
        rows = loop.measurements(0)
        assert {row["version"] for row in rows} == {"v1"}
        assert sum(row["live_sum"] for row in rows) < 0.7 * sum(row["static_sum"] for row in rows)
        back = Champion(**store.orders.ask("rollback", reason="it was a drill"))
        assert (back.version, back.number) == ("base", 2)
        assert store.champion() == back


def test_a_forced_version_that_falls_live_is_taken_back_by_the_learner_itself(
    serving: TinyServing, tmp_path: Path, redis_url: str
) -> None:
    config = configured(serving, tmp_path, redis_url, rollout__watch_tokens=400)
    store, counters = Store(config.redis.url, config.redis.prefix), Counters()

    def served(version: str, accepted: int) -> None:
        """A replica that follows at once reports five more requests, 20 tested each."""
        for _ in range(5):
            uneven = int(counters.total("served.requests")) % 3 - 1
            add_request(counters, "chat", version, steps=40, accepted=accepted + uneven, tested=20)
        store.put_counters("r0", "1", counters.fields)
        store.put_status("replica:r0", {"drafter_version": version, "round_s": [0.01, 0.012, 0.014]}, ttl_s=60)

    with running(config) as loop:
        loop.pause()
        for _ in range(8):
            served("base", 12)
        until(lambda: "champion" in loop.status)
        base = load_base(config)
        assert base is not None
        drafter, settings = base.copy(), LoraSettings(rank=4, lora_alpha=4)
        add_lora(drafter, settings)
        manifest = Manifest("x", base.kind, "lora", base.target, base=base.hash)
        blob = store.put_blob(pack_blob(export_lora(drafter, settings, manifest)))
        until(lambda: loop._parts is not None and loop._parts.fleet.versions == {"r0": "base"})
        store.orders.ask("force", blob=blob, reason="a drill")
        until(lambda: loop.status.get("watch", {}).get("version") == "v1")
        until(lambda: loop.status["rollbacks"] == 1, meanwhile=lambda: served("v1", 4))
        champion = store.champion()
        assert champion is not None
        assert (champion.version, champion.previous, champion.number) == ("base", "v1", 2)
        assert store.orders.ask("versions")["versions"][0]["watch"].startswith("v1 fell: live alpha ")
    store.close()


def test_with_a_pinned_champion_attempts_go_on_and_say_why_nothing_is_promoted(
    serving: TinyServing, config: Config, store: Store
) -> None:
    with running(config) as loop:
        until(lambda: "champion" in loop.status)
        store.orders.ask("pin", reason="a drill")
        until(
            lambda: loop.status["decision"].startswith("pinned: base stays until it is unpinned, though alpha"),
            meanwhile=lambda: serving.publish(store, loop.inbox, 8),
        )
        assert store.champion() is None
        assert (loop.status["promotions"], loop.status["pinned"]) == (0, True)


def _served_by(record: Any, version: str) -> Any:
    return replace(record, rounds=tuple(replace(round_, version=version) for round_ in record.rounds))


def test_orders_to_a_learner_without_a_drafter_are_refused_and_the_reason_is_said(config: Config, store: Store) -> None:
    nothing = replace(config, drafter=replace(config.drafter, kind="none"))
    with running(nothing) as loop:
        until(lambda: "learner" in store.statuses())
        until(lambda: any("nothing drafts" in said for said in loop.status.get("trouble", ())))
        with pytest.raises(Declined, match="has not loaded its drafter"):
            store.orders.ask("rollback", reason="no reason")
    gone = replace(config, drafter=replace(config.drafter, model="/no/such/folder"))
    with running(gone) as loop:
        until(lambda: "learner" in store.statuses())
        until(lambda: any("/no/such/folder" in said for said in loop.status.get("trouble", ())))
        assert loop.measurements(0) == []


def test_a_failing_attempt_is_a_refusal_and_not_the_end(serving: TinyServing, tmp_path: Path, redis_url: str) -> None:
    config = configured(serving, tmp_path, redis_url, learner__lora_targets=["no_such_linear"])
    store = Store(config.redis.url, config.redis.prefix)
    with running(config) as loop:
        until(lambda: loop.status.get("refusals"), meanwhile=lambda: serving.publish(store, loop.inbox, 8))
        assert "no_such_linear" in loop.status["decision"]
        assert loop.status["counters"]["attempts_failed"] >= 1
        count = len(loop.measurements(0))
        serving.publish(store, loop.inbox, 2)
        until(lambda: len(loop.measurements(0)) > count)
    store.close()


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
    serving: TinyServing, config: Config, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    run = Database.run

    def no_room(self: Database, sql: str, *values: Any) -> Any:
        if sql.startswith("INSERT"):
            raise full
        return run(self, sql, *values)

    with running(config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        with monkeypatch.context() as patch:
            patch.setattr(Database, "run", no_room)
            served = serving.publish(store, loop.inbox, 8)
            until(lambda: any("disk is full" in said for said in loop.status["trouble"]))
            until(lambda: loop.status["counters"].get("disk_failures", 0) >= 2)
            assert store.stream_depth().pending + store.stream_depth().lag == len(served)
            assert loop.measurements(0) == []
        until(lambda: len(loop.measurements(0)) == len(served))
        until(lambda: not any("disk" in said for said in loop.status["trouble"]))
        assert store.stream_depth().pending == 0


@pytest.mark.parametrize(
    "moment", ["redis", pytest.param("shelf", marks=pytest.mark.slow), pytest.param("progress", marks=pytest.mark.slow)]
)
def test_a_kill_around_the_promotion_neither_loses_it_nor_makes_it_twice(
    serving: TinyServing, config: Config, store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
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
        serving.publish(store, loop.inbox, 16)  # what the gate waits for comes while it trains
        return examples

    loop = LearnerLoop(config, prepare=judged_on)
    loop._journal.start()

    def learn() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            serving.publish(store, loop.inbox, 8)
            loop.step()

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            learn()
    assert loop._parts is not None
    number = loop._parts.progress.attempts
    loop._parts.database.close()
    with running(config) as again:
        until(lambda: again.status.get("promotions"))
        until(lambda: store.champion() is not None)
        assert again.status["champion"] == "v1"
        assert (again.status["attempts"], again.status["promotions"]) == (number, 1)
        champion = store.champion()
        assert champion is not None
        assert (champion.version, champion.number) == ("v1", 1)
