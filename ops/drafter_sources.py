"""Where versions of a drafter are looked up: at the running learner, through Redis, or on its shelf on this disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.database import reading
from ops.report_sources import newest_buffer
from ops.run_file import read_run_file
from shared.config import Config
from shared.errors import ConfigError, ServiceDown
from shared.store import Store

if TYPE_CHECKING:
    from shared.artifact import Artifact

BASE = "base"


class Running:
    """Asks the learner. Raises ServiceDown when it does not answer, Declined with its reason."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def versions(self) -> list[dict[str, Any]]:
        return _with_states(**self._store.orders.ask("versions"))

    def artifact(self, version: str) -> Artifact | None:
        """None for the base."""
        if version == BASE:
            return None
        return self._fetch(self._store.orders.ask("blob", version=version))

    def order(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The pointer that came of it."""
        found: dict[str, Any] = self._store.orders.ask(name, **arguments)
        return found

    def force(self, folder: Path, reason: str) -> dict[str, Any]:
        """An exported adapter. Raises ArtifactError for a folder that holds none."""
        from shared.artifact import load_folder, pack_blob

        blob = pack_blob(load_folder(folder)[0])
        return self.order("force", blob=self._store.put_blob(blob), reason=reason)

    def champion(self) -> str:
        champion = self._store.champion()
        return champion.version if champion is not None else BASE

    def close(self) -> None:
        self._store.close()

    def _fetch(self, hash: str) -> Artifact:
        from shared.artifact import open_blob

        blob = self._store.get_blob(hash)
        if blob is None:
            raise ServiceDown(f"the blob {hash[:12]}… is gone from Redis before it was fetched: ask again")
        return open_blob(blob, hash)


class OnDisk:
    """Reads a learner's file, whether one runs or not."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def versions(self) -> list[dict[str, Any]]:
        with reading(self._file) as connection:
            rows = connection.execute("SELECT version, number, blob_hash, length(blob), facts FROM versions")
            versions = [
                {**json.loads(facts), "version": version, "number": number, "blob": blob, "bytes": size}
                for version, number, blob, size, facts in rows
            ]
            state = {row["key"]: json.loads(row["value"]) for row in connection.execute("SELECT * FROM state")}
        release = state.get("release") or {}
        watching = release.get("watching")
        watch = {"version": watching["pointer"]["version"], "canary": watching["canary"]} if watching else None
        return _with_states(state.get("champion") or {}, versions, bool(release.get("pinned")), watch)

    def artifact(self, version: str) -> Artifact | None:
        """None for the base."""
        from shared.artifact import open_blob

        if version == BASE:
            return None
        with reading(self._file) as connection:
            row = connection.execute("SELECT blob, blob_hash FROM versions WHERE version = ?", (version,)).fetchone()
        if row is None:
            raise ConfigError("version", f"{version} is not on the shelf", "`redraft drafters list` shows what is.")
        return open_blob(row["blob"], row["blob_hash"])

    def close(self) -> None:
        """Nothing is held open."""


def open_source(config: Config) -> Running | OnDisk:
    """The running stack, or the newest shelf of this home. Raises ConfigError where there is neither."""
    running = read_run_file(config.home_path)
    url = config.redis.url or (running.redis if running else "")
    if url:
        return Running(Store(url, config.redis.prefix))
    return OnDisk(newest_buffer(config.home_path))


def _with_states(
    champion: Mapping[str, Any], versions: list[dict[str, Any]], pinned: bool, watch: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Oldest first, the base before all others, each with what it is now."""
    serving, previous = champion.get("version", BASE), champion.get("previous", "")
    found = []
    for facts in [{"version": BASE, "number": 0}, *sorted(versions, key=lambda facts: facts["number"])]:
        version = facts["version"]
        watched = watch is not None and watch["version"] == version
        states = {
            "champion": version == serving,
            "previous": version == previous,
            "canary": watched and watch is not None and bool(watch["canary"]),
            "watched": watched,
            "pinned": pinned and version == serving,
        }
        found.append({**facts, "state": ", ".join(state for state, holds in states.items() if holds)})
    return found
