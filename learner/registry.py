"""The only door to MLflow: the long serving run, a run for each attempt, the registered model with its aliases.

Every call either succeeds or raises within seconds: ServiceDown when MLflow does not answer, Refused when it answered
and did not take it. Calls may be repeated: runs and versions are found by their tags before they are made anew. It
holds no queue and starts no thread; `learner.journal` does.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from learner.lineage import ANYBODY, tenants_of
from learner.shelf import Shelved
from shared.artifact import MANIFEST_FILE, WEIGHTS_FILE, Manifest, hash_blob, open_blob
from shared.config import Config
from shared.errors import RedraftError, ServiceDown
from shared.store import Champion

MODEL = "drafter"
CHAMPION, PREVIOUS = "champion", "previous"
POINTS_AT_ONCE = 1000  # MLflow's own limit of a batch
_PARAM_LENGTH = 500
_LINEAGE, _TENANT = "redraft.lineage", "redraft.tenant."
_HTTP_TIMEOUT_S, _HTTP_RETRIES = "10", "1"  # its own defaults wait for minutes

T = TypeVar("T")


class Refused(RedraftError):
    """MLflow answers and does not take what it was given."""


@dataclass(frozen=True)
class Point:
    """A value of the serving run."""

    key: str
    value: float
    at: float  # seconds since the epoch
    step: int


@dataclass(frozen=True)
class AttemptEntry:
    """One decision as its run shows it: of an attempt, of a watch, of a person."""

    name: str
    started_at: float
    ended_at: float
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    losses: tuple[float, ...] = ()  # by step
    kind: str = "attempt"


class Registry:
    """`session` names one life of the stack (letters and digits): an actor that restarts goes on with the same run."""

    def __init__(self, config: Config, session: str) -> None:
        self._uri, self._experiment_name = config.mlflow.tracking_uri, config.mlflow.experiment
        self._session = session
        self._tags = {
            "redraft.kind": "serving",
            "redraft.session": session,
            "redraft.home": f"{socket.gethostname()}:{config.home_path}",
            "redraft.target": config.target.model,
        }
        self._client: Any = None
        self._experiment = self._serving = ""  # ids, once they are known

    def log_points(self, points: Sequence[Point]) -> None:
        """At most POINTS_AT_ONCE of them."""

        def write(client: Any) -> None:
            from mlflow.entities import Metric

            run = self._serving_run(client)
            client.log_batch(run, metrics=[Metric(_named(p.key), p.value, _ms(p.at), p.step) for p in points])

        self._call(write)

    def log_attempt(self, entry: AttemptEntry) -> None:
        def write(client: Any) -> None:
            from mlflow.entities import Metric, Param

            serving = self._serving_run(client)
            tags = {**entry.tags, "redraft.kind": entry.kind, "redraft.session": self._session}
            run = self._find_run(client, entry.kind, {"mlflow.runName": entry.name})
            if run is None:
                tags |= {"mlflow.parentRunId": serving}
                made = client.create_run(
                    self._experiment, start_time=_ms(entry.started_at), tags=tags, run_name=entry.name
                )
                run = made.info.run_id
            params = [Param(name, str(value)[:_PARAM_LENGTH]) for name, value in entry.params.items()]
            end, steps = entry.ended_at, len(entry.losses)
            metrics = [Metric(_named(name), value, _ms(end), 0) for name, value in entry.metrics.items()]
            span = (end - entry.started_at) / max(steps, 1)
            metrics += [
                Metric("train/loss", loss, _ms(entry.started_at + span * step), step)
                for step, loss in enumerate(entry.losses, start=1)
            ]
            for first in range(0, max(len(metrics), 1), POINTS_AT_ONCE):
                chunk = metrics[first : first + POINTS_AT_ONCE]
                client.log_batch(run, metrics=chunk, params=params if first == 0 else ())
            client.set_terminated(run, "FINISHED", _ms(end))

        self._call(write)

    def add_version(self, entry: Shelved) -> None:
        """A version of the registered model, with the blob as its artifact; one that is there already stays."""

        def write(client: Any) -> None:
            serving = self._serving_run(client)
            if self._model_version(client, entry.version, entry.blob_hash) is not None:
                return
            manifest = open_blob(entry.blob).manifest
            facts = {name: value for name, value in entry.facts.items() if value is not None}
            tags = {
                "redraft.version": entry.version,
                "redraft.number": str(entry.number),
                "redraft.blob": entry.blob_hash,
                "redraft.base": manifest.base,
                "redraft.target": manifest.target,
                "redraft.kind": manifest.kind,
                "redraft.experiment": self._experiment_name,
                **_lineage_tags(manifest),
                **{f"redraft.{name}": str(value)[:_PARAM_LENGTH] for name, value in facts.items()},
            }
            logged = client.create_logged_model(
                self._experiment,
                name=f"{MODEL}-{entry.version}",
                source_run_id=serving,
                tags=tags,
                params={name: str(value) for name, value in manifest.config.items()},
                model_type="lora",
            )
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / WEIGHTS_FILE).write_bytes(entry.blob)
                (Path(folder) / MANIFEST_FILE).write_text(_manifest_text(entry.blob), encoding="utf-8")
                client.log_model_artifacts(logged.model_id, folder)
            client.finalize_logged_model(logged.model_id, "READY")
            client.create_model_version(
                MODEL,
                source=f"models:/{logged.model_id}",
                run_id=serving,
                tags=tags,
                description=str(facts.get("reason", "")),
                model_id=logged.model_id,
            )

        self._call(write)

    def set_aliases(self, champion: str, previous: str) -> None:
        """The base has no version in MLflow, so no alias stands for it."""

        def write(client: Any) -> None:
            self._serving_run(client)
            held = client.get_registered_model(MODEL).aliases
            for alias, version in ((CHAMPION, champion), (PREVIOUS, previous)):
                found = self._model_version(client, version) if version else None
                if found is not None:
                    client.set_registered_model_alias(MODEL, alias, found.version)
                elif alias in held:
                    client.delete_registered_model_alias(MODEL, alias)

        self._call(write)

    def erase(self, tenant: str) -> None:
        """Deletes each version of this experiment that may have learnt from a tenant, its blob included."""

        def write(client: Any) -> None:
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            self._serving_run(client)
            for version in _all_versions(client):
                tags = version.tags
                ours = tags.get("redraft.experiment", self._experiment_name) == self._experiment_name
                clean = tags.get(_LINEAGE) == "known" and f"{_TENANT}{tenant}" not in tags
                if not ours or clean:
                    continue
                if (model_id := _logged_model(version)) is not None:
                    logged = client.get_logged_model(model_id)
                    blobs: Any = get_artifact_repository(logged.artifact_location, self._uri)
                    blobs.delete_artifacts()
                    client.delete_logged_model(model_id)
                client.delete_model_version(MODEL, version.version)

        self._call(write)

    def find_champion(self, base: str) -> tuple[Champion, bytes] | None:
        """The champion and its blob, if MLflow's is one of this base."""

        def read(client: Any) -> tuple[Champion, bytes] | None:
            import mlflow

            self._serving_run(client)
            held = client.get_registered_model(MODEL).aliases
            if CHAMPION not in held:
                return None
            tags = client.get_model_version(MODEL, held[CHAMPION]).tags
            if tags.get("redraft.base") != base:
                return None
            with tempfile.TemporaryDirectory() as folder:
                mlflow.artifacts.download_artifacts(f"models:/{MODEL}/{held[CHAMPION]}", dst_path=folder)
                blob = (Path(folder) / WEIGHTS_FILE).read_bytes()
            before = client.get_model_version(MODEL, held[PREVIOUS]).tags if PREVIOUS in held else {}
            champion = Champion(
                version=tags["redraft.version"],
                blob=hash_blob(blob),
                base=base,
                target=tags["redraft.target"],
                kind=tags["redraft.kind"],
                number=int(tags["redraft.number"]),
                previous=before.get("redraft.version", "base"),
                created_at=float(tags.get("redraft.created_at", 0.0)),
            )
            return champion, blob

        return self._call(read)

    def close(self) -> None:
        """Ends the serving run."""
        if self._serving:
            self._call(lambda client: client.set_terminated(self._serving, "FINISHED"))

    def _call(self, action: Callable[[Any], T]) -> T:
        """Runs `action` with a client. Raises ServiceDown or Refused."""
        try:
            return action(self._connected())
        except Exception as error:  # MLflow lets through whatever its transports and stores raise
            self._experiment = self._serving = ""  # perhaps it came back empty
            message = f"MLflow at {self._uri}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
            try:
                self._connected().search_experiments(max_results=1)
            except Exception:
                raise ServiceDown(message) from error
            raise Refused(message) from error

    def _connected(self) -> Any:
        if self._client is None:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _HTTP_TIMEOUT_S)
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _HTTP_RETRIES)
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            import mlflow

            # Also for the whole process: sources of the form models:/ are resolved through it.
            mlflow.set_tracking_uri(self._uri)
            self._client = mlflow.MlflowClient(self._uri)
        return self._client

    def _serving_run(self, client: Any) -> str:
        """The run of this session, made if need be; runs that earlier sessions here left open are ended."""
        if self._serving:
            return self._serving
        found = client.get_experiment_by_name(self._experiment_name)
        self._experiment = found.experiment_id if found else client.create_experiment(self._experiment_name)
        _ensure_model(client)
        running = "tags.`redraft.kind` = 'serving' and attributes.status = 'RUNNING'"
        for run in client.search_runs([self._experiment], running):
            tags = run.data.tags
            here = tags.get("redraft.home") == self._tags["redraft.home"]
            if here and tags.get("redraft.session") != self._session:
                client.set_terminated(run.info.run_id, "KILLED")
        serving = self._find_run(client, "serving", {"redraft.home": self._tags["redraft.home"]})
        if serving is None:
            name = time.strftime("serving %Y-%m-%d %H:%M:%S")
            serving = client.create_run(self._experiment, tags=self._tags, run_name=name).info.run_id
        self._serving = serving
        return serving

    def _find_run(self, client: Any, kind: str, tags: Mapping[str, str]) -> str | None:
        """A run of this session; `tags` are compared here, since a filter cannot hold every text."""
        mine = f"tags.`redraft.kind` = '{kind}' and tags.`redraft.session` = '{self._session}'"
        for run in client.search_runs([self._experiment], mine):
            if tags.items() <= run.data.tags.items():
                return str(run.info.run_id)
        return None

    def _model_version(self, client: Any, version: str, blob_hash: str = "") -> Any:
        """The newest version in MLflow that carries this name of ours."""
        found = client.search_model_versions(f"name = '{MODEL}' and tags.`redraft.version` = '{version}'")
        fitting = [other for other in found if not blob_hash or other.tags.get("redraft.blob") == blob_hash]
        return max(fitting, key=lambda other: int(other.version), default=None)


def _ensure_model(client: Any) -> None:
    if not client.search_registered_models(f"name = '{MODEL}'"):
        client.create_registered_model(MODEL, description="Adapters of the drafter that learns from its own traffic")


def _lineage_tags(manifest: Manifest) -> dict[str, str]:
    """One tag for each tenant, because there is no end to the length of a list."""
    tenants = tenants_of(manifest)
    if ANYBODY in tenants:
        return {_LINEAGE: "unknown"}
    return {_LINEAGE: "known"} | {f"{_TENANT}{tenant}": "learnt" for tenant in tenants}


def _logged_model(version: Any) -> str | None:
    """Its id, which a store in a database tells as a part of the source only; None for one that is not ours."""
    place, _, model_id = str(version.source).rpartition("/")
    return model_id if place == "models:" else None


def _all_versions(client: Any) -> list[Any]:
    found, token = [], None
    while True:
        page = client.search_model_versions(f"name = '{MODEL}'", page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _manifest_text(blob: bytes) -> str:
    return json.dumps(asdict(open_blob(blob).manifest), indent=2, sort_keys=True) + "\n"


def _named(key: str) -> str:
    """A metric's name with what MLflow does not allow replaced."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in key)[:250] or "_"


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
