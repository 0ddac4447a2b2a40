"""The whole learner over a real Redis and a real MLflow store: it learns, says so, and outlives what it depends on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.base import load_base
from learner.buffer import read_measurements
from learner.lora import LoraSettings, add_lora, export_lora
from learner.registry import CHAMPION, MODEL
from shared.artifact import Manifest, open_blob, pack_blob
from shared.config import Config
from shared.counters import Counters
from shared.errors import Declined
from shared.live_alpha import add_request
from shared.store import Champion, Store
from tests.learner.loops import configured, running, until
from tests.learner.traffic import Served, TinyServing


def test_it_learns_from_traffic_and_promotes_what_is_better(
    serving: TinyServing, loop_config: Config, loop_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)  # where a store without a server puts its artifacts
    before = mlflow.get_tracking_uri()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    loop_config = replace(loop_config, mlflow=replace(loop_config.mlflow, tracking_uri=uri))
    counters = Counters()

    def traffic() -> None:
        for item in serving.publish(loop_store, loop.inbox, 8):
            for round_ in item.record.rounds:
                counters.add("accepted", round_.accepted, domain="chat", version="base")
                counters.add("tested", round_.tested, domain="chat", version="base")
            counters.add("emitted", len(item.record.output_ids), domain="chat")
        loop_store.put_counters("replica", "1", counters.fields)

    seen: list[Mapping[str, Any]] = []
    with running(loop_config, session="first", watch=seen.append) as loop:
        until(lambda: loop_store.champion() is not None, meanwhile=traffic)
        until(lambda: loop.status.get("promotions"), meanwhile=traffic)
        status = loop.status
        assert status["decision"].startswith("promoted: alpha")
        assert status["counters"]["traces_stored"] >= 36
        assert status["counters"]["decisions.promoted"] >= 1
        assert "promoted" in [decision["outcome"] for decision in status["decisions"]]
        assert seen[0]["at"] < seen[-1]["at"] <= time.time(), "whoever watches hears every heartbeat"
        assert loop_store.statuses()["learner"]["state"]
        champion = loop_store.champion()
        assert champion is not None
        blob = loop_store.get_blob(champion.blob)
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
    experiment = client.get_experiment_by_name(loop_config.mlflow.experiment).experiment_id
    runs = {run.data.tags["redraft.kind"]: run for run in client.search_runs([experiment])}
    assert {"alpha/chat", "drift/chat", "alpha_static/chat", "drafter_version"} <= set(runs["serving"].data.metrics)
    assert runs["serving"].info.status == "FINISHED"
    attempt = runs["attempt"].data
    assert attempt.tags["redraft.decision"] in ("promoted", "refused", "undecided")
    assert {"train/loss", "train/tokens", "gate/alpha_before", "gate/alpha_after"} <= set(attempt.metrics)
    assert client.get_model_version_by_alias(MODEL, CHAMPION).tags["redraft.base"] == champion.base
    mlflow.set_tracking_uri(before)


def test_a_restart_goes_on_where_it_ended(serving: TinyServing, loop_config: Config, loop_store: Store) -> None:
    published: list[Served] = []

    def traffic() -> None:
        published.extend(serving.publish(loop_store, loop.inbox, 8))

    with running(loop_config) as loop:
        until(lambda: loop.status.get("promotions"), meanwhile=traffic)
        loop.pause()
        until(lambda: loop.status["state"] == "paused", meanwhile=traffic)
        until(lambda: loop.status["counters"]["traces_stored"] == len(published))
        first = loop.status
    with running(loop_config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        second = loop.status
    for name in ("champion", "number", "attempts", "promotions", "decision", "decisions", "fresh_tokens", "kept"):
        assert second[name] == first[name], name
    assert second["drift"] == first["drift"]


def test_an_operator_forces_a_bad_version_and_takes_it_back(
    serving: TinyServing, loop_config: Config, loop_store: Store
) -> None:
    base = load_base(loop_config)
    assert base is not None
    drafter, settings = base.copy(), LoraSettings(rank=16, lora_alpha=32)
    add_lora(drafter, settings)
    for name, parameter in drafter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=1.0)
    noise = pack_blob(export_lora(drafter, settings, Manifest("x", base.kind, "lora", base.target, base=base.hash)))
    with running(loop_config) as loop:
        loop.pause()
        until(lambda: "champion" in loop.status)
        forced = Champion(**loop_store.orders.ask("force", blob=loop_store.put_blob(noise), reason="a drill"))
        assert loop_store.champion() == forced
        assert (forced.version, forced.number) == ("v1", 1)
        with pytest.raises(Declined, match="ends inside its header"):
            loop_store.orders.ask("force", blob=loop_store.put_blob(noise[:50]), reason="a drill")
        # Requests that the bad version served measure worse than the base on the same positions.
        bad = [replace(item, record=_served_by(item.record, "v1")) for item in serving.serve(12)]
        for item in bad:
            loop.inbox.put(item.record.id, item.features)
            loop_store.append_trace(item.data, max_bytes=2**26)
        until(lambda: len(loop.measurements(0)) == 12)
        rows = loop.measurements(0)
        assert {row["version"] for row in rows} == {"v1"}
        assert sum(row["live_sum"] for row in rows) < 0.7 * sum(row["static_sum"] for row in rows)
        back = Champion(**loop_store.orders.ask("rollback", reason="it was a drill"))
        assert (back.version, back.number) == ("base", 2)
        assert loop_store.champion() == back


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
    serving: TinyServing, loop_config: Config, loop_store: Store
) -> None:
    with running(loop_config) as loop:
        until(lambda: "champion" in loop.status)
        loop_store.orders.ask("pin", reason="a drill")
        until(
            lambda: loop.status["decision"].startswith("pinned: base stays until it is unpinned, though alpha"),
            meanwhile=lambda: serving.publish(loop_store, loop.inbox, 8),
        )
        assert loop_store.champion() is None
        assert (loop.status["promotions"], loop.status["pinned"]) == (0, True)


def _served_by(record: Any, version: str) -> Any:
    return replace(record, rounds=tuple(replace(round_, version=version) for round_ in record.rounds))


def test_orders_to_a_learner_without_a_drafter_are_refused_and_the_reason_is_said(
    loop_config: Config, loop_store: Store
) -> None:
    nothing = replace(loop_config, drafter=replace(loop_config.drafter, kind="none"))
    with running(nothing) as loop:
        until(lambda: "learner" in loop_store.statuses())
        until(lambda: any("nothing drafts" in said for said in loop.status.get("trouble", ())))
        with pytest.raises(Declined, match="has not loaded its drafter"):
            loop_store.orders.ask("rollback", reason="no reason")
    gone = replace(loop_config, drafter=replace(loop_config.drafter, model="/no/such/folder"))
    with running(gone) as loop:
        until(lambda: "learner" in loop_store.statuses())
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
