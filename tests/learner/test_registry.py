"""MLflow holds what was decided: a real tracking store, then a real server that goes away and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from learner.journal import Journal
from learner.registry import CHAMPION, MODEL, PREVIOUS, AttemptEntry, Point, Registry
from learner.shelf import Shelved
from ops.local_mlflow import start_mlflow
from ops.processes import Supervisor
from shared.artifact import Artifact, Manifest, hash_blob, open_blob, pack_blob
from shared.config import Config, config_from_flat
from shared.errors import ServiceDown

BASE, TARGET = "b" * 64, "t" * 64 + ":fp16"


def version(name: str, number: int, base: str = BASE) -> Shelved:
    manifest = Manifest(name, "eagle3", "lora", TARGET, base=base, config={"rank": 4, "lora_alpha": 8})
    blob = pack_blob(Artifact(manifest, {"fc.lora_A": torch.full((2, 2), float(number))}))
    facts = {"parent": "base", "reason": f"promoted: {name}", "alpha_before": 0.25, "previous": "base"}
    return Shelved(name, number, hash_blob(blob), blob, facts)


ATTEMPT = AttemptEntry(
    name="attempt 1: promoted",
    started_at=1000.0,
    ended_at=1060.0,
    params={"parent": "base", "requests": 12},
    metrics={"gate/alpha_before": 0.25, "gate/alpha_after": 0.5},
    tags={"redraft.decision": "promoted", "redraft.reason": "promoted: it's better"},
    losses=(3.0, 2.0, 1.0),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where a store without a server puts its artifacts
        yield config_from_flat({"home": str(folder), "mlflow.tracking_uri": f"sqlite:///{folder / 'mlflow.db'}"})


@pytest.fixture(scope="module")
def client(config: Config) -> Iterator[Any]:
    import mlflow

    before = mlflow.get_tracking_uri()
    yield mlflow.MlflowClient(config.mlflow.tracking_uri)
    mlflow.set_tracking_uri(before)


@pytest.fixture
def named(request: pytest.FixtureRequest, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The same store with an experiment and a home of the test's own."""
    monkeypatch.chdir(tmp_path)  # where a store without a server puts its artifacts
    changed = replace(config.mlflow, experiment=request.node.name)
    return replace(config, mlflow=changed, home=str(tmp_path))


def runs(client: Any, config: Config) -> list[Any]:
    experiment = client.get_experiment_by_name(config.mlflow.experiment)
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))


def test_windows_become_curves_of_one_run_with_their_own_times(named: Config, client: Any) -> None:
    registry = Registry(named, "session")
    registry.log_points([Point("alpha", 0.5, 1000.0, 100), Point("alpha/sql|x", 0.25, 1000.0, 100)])
    registry.log_points([Point("alpha", 0.75, 1005.0, 200)])
    (run,) = runs(client, named)
    assert run.info.status == "RUNNING"
    history = client.get_metric_history(run.info.run_id, "alpha")
    assert [(m.value, m.step, m.timestamp) for m in history] == [(0.5, 100, 1_000_000), (0.75, 200, 1_005_000)]
    assert run.data.metrics["alpha/sql_x"] == 0.25
    registry.close()
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_an_actor_that_restarts_goes_on_and_a_new_stack_begins_anew(named: Config, client: Any) -> None:
    Registry(named, "one").log_points([Point("alpha", 0.5, 1000.0, 1)])
    Registry(named, "one").log_points([Point("alpha", 0.6, 1001.0, 2)])
    elsewhere = replace(named, home="/elsewhere")
    Registry(elsewhere, "other").log_points([Point("alpha", 0.5, 1000.0, 1)])
    assert len(runs(client, named)) == 2
    Registry(named, "two").log_points([Point("alpha", 0.7, 1002.0, 3)])
    status = {run.data.tags["redraft.session"]: run.info.status for run in runs(client, named)}
    assert status == {"one": "KILLED", "two": "RUNNING", "other": "RUNNING"}


def test_an_attempt_is_a_run_below_the_serving_run(named: Config, client: Any) -> None:
    registry = Registry(named, "session")
    for _ in range(2):  # delivered again after a lost reply
        registry.log_attempt(ATTEMPT)
    by_kind = {run.data.tags["redraft.kind"]: run for run in runs(client, named)}
    assert len(runs(client, named)) == 2
    attempt = by_kind["attempt"]
    assert attempt.data.tags["mlflow.parentRunId"] == by_kind["serving"].info.run_id
    assert (attempt.info.status, attempt.info.start_time, attempt.info.end_time) == ("FINISHED", 1_000_000, 1_060_000)
    assert attempt.data.metrics["gate/alpha_after"] == 0.5
    assert attempt.data.params["parent"] == "base"
    assert attempt.data.tags["redraft.reason"] == "promoted: it's better"
    losses = client.get_metric_history(attempt.info.run_id, "train/loss")
    assert sorted({(m.step, m.value) for m in losses}) == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_versions_carry_their_blob_and_aliases_follow_the_champion(named: Config, client: Any) -> None:
    registry = Registry(named, "session")
    assert registry.find_champion(BASE) is None
    first, second = version("v1", 1), version("v2", 2)
    for _ in range(2):
        registry.add_version(first)
    registry.set_aliases("v1", "base")
    assert len(client.search_model_versions(f"name = '{MODEL}'")) == 1
    assert set(client.get_registered_model(MODEL).aliases) == {CHAMPION}
    registry.add_version(second)
    registry.set_aliases("v2", "v1")
    champion = client.get_model_version_by_alias(MODEL, CHAMPION)
    assert champion.tags["redraft.version"] == "v2"
    assert champion.tags["redraft.blob"] == second.blob_hash
    assert champion.tags["redraft.alpha_before"] == "0.25"
    assert champion.description == "promoted: v2"
    assert client.get_model_version_by_alias(MODEL, PREVIOUS).tags["redraft.version"] == "v1"
    found = registry.find_champion(BASE)
    assert found is not None
    pointer, blob = found
    assert blob == second.blob
    assert (pointer.version, pointer.number, pointer.previous, pointer.blob) == ("v2", 2, "v1", second.blob_hash)
    assert (pointer.base, pointer.target, pointer.kind) == (BASE, TARGET, "eagle3")
    assert registry.find_champion("another base") is None
    registry.set_aliases("base", "v2")  # a rollback to the base
    assert set(client.get_registered_model(MODEL).aliases) == {PREVIOUS}


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def learnt(name: str, number: int, *tenants: str) -> Shelved:
    shelved = version(name, number)
    artifact = open_blob(shelved.blob)
    blob = pack_blob(replace(artifact, manifest=replace(artifact.manifest, origin={"tenants": list(tenants)})))
    return replace(shelved, blob=blob, blob_hash=hash_blob(blob))


def test_an_erasure_deletes_the_versions_and_the_blobs_that_learnt_from_the_tenant(named: Config, client: Any) -> None:
    registry = Registry(named, "session")
    kept, gone, silent = learnt("v101", 1, "other"), learnt("v102", 2, "acme", "other"), version("v103", 3)
    for entry in (kept, gone, silent):
        registry.add_version(entry)
    registry.set_aliases("v102", "v101")
    found = {
        entry.tags["redraft.version"]: entry
        for entry in client.search_model_versions(f"name = '{MODEL}'")
        if entry.tags.get("redraft.experiment") == named.mlflow.experiment
    }
    assert set(found) == {"v101", "v102", "v103"}
    places = {
        name: Path(
            client.get_logged_model(entry.source.removeprefix("models:/")).artifact_location.removeprefix("file://")
        )
        for name, entry in found.items()
    }
    assert all(list(place.rglob("*.safetensors")) for place in places.values())
    stranger = Registry(replace(named, mlflow=replace(named.mlflow, experiment="another installation")), "other")
    stranger.add_version(learnt("v104", 1, "acme"))
    for _ in range(2):  # a delivery may be repeated
        registry.erase("acme")
    left = {entry.tags["redraft.version"] for entry in client.search_model_versions(f"name = '{MODEL}'")}
    assert {"v101", "v104"} <= left
    assert not {"v102", "v103"} & left
    assert [name for name, place in places.items() if list(place.rglob("*.safetensors"))] == ["v101"]
    registry.set_aliases("v101", "base")
    assert client.get_model_version_by_alias(MODEL, CHAMPION).tags["redraft.version"] == "v101"


def _kill(pid: int) -> None:
    """The server and its workers: without them it would go on answering."""
    process = psutil.Process(pid)
    for one in (*process.children(recursive=True), process):
        one.kill()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_misses_nothing(tmp_path: Path) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    config = config_from_flat({"home": str(tmp_path)})
    with Supervisor(tmp_path / "logs") as supervisor:
        uri = start_mlflow(supervisor, config)
        config = replace(config, mlflow=replace(config.mlflow, tracking_uri=uri))
        journal = Journal(Registry(config, "session"))
        journal.start()
        journal.window({"alpha": 0.5}, step=1, at=1000.0)
        until(lambda: journal.status()["waiting"] == 0)
        _kill(supervisor.children[0].pid)
        until(lambda: not supervisor.children[0].alive)
        started = time.monotonic()
        journal.window({"alpha": 0.25}, step=2, at=1001.0)
        journal.attempt(ATTEMPT)
        journal.version(version("v1", 1))
        journal.aliases("v1", "base")
        assert time.monotonic() - started < 1.0, "a caller has waited for MLflow"
        until(lambda: journal.status()["trouble"] != "")
        assert journal.status()["waiting"] == 4
        assert journal.registered() == []
        until(lambda: supervisor.revive() != [])
        until(lambda: journal.status()["waiting"] == 0, 120.0)
        assert journal.status() == {"waiting": 0, "given_up": 0, "trouble": ""}
        assert journal.registered() == ["v1"]
        client = mlflow.MlflowClient(uri)
        serving = next(run for run in runs(client, config) if run.data.tags["redraft.kind"] == "serving")
        history = client.get_metric_history(serving.info.run_id, "alpha")
        assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.5, 1_000_000), (2, 0.25, 1_001_000)]
        assert len(runs(client, config)) == 2
        assert client.get_model_version_by_alias(MODEL, CHAMPION).tags["redraft.version"] == "v1"
        journal.stop(20.0)
        assert client.get_run(serving.info.run_id).info.status == "FINISHED"
    mlflow.set_tracking_uri(before)


def test_a_port_where_nobody_listens_is_a_service_that_is_down() -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    registry = Registry(config_from_flat({"mlflow.tracking_uri": "http://127.0.0.1:9"}), "session")
    with pytest.raises(ServiceDown, match=r"127\.0\.0\.1:9"):
        registry.log_points([Point("alpha", 0.5, 1000.0, 1)])
    mlflow.set_tracking_uri(before)
