"""Promoted versions on this machine's disk: each adapter blob with its facts, and which one is the champion.

The shelf is written before Redis and before MLflow, so that either may be away, or come back empty, and nothing that
was decided is lost. It promotes nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from learner.base import BASE_VERSION, Base
from learner.database import Database
from learner.lineage import blob_learnt_from
from shared.artifact import Artifact, hash_blob, open_blob
from shared.errors import ArtifactError
from shared.store import Champion

KEPT = 16  # newest versions, besides the champion and the one before it


@dataclass(frozen=True)
class Shelved:
    """A promoted version. `facts` say how it came about: parent, reason, alpha before and after."""

    version: str
    number: int  # of the champion pointer when it was promoted
    blob_hash: str
    blob: bytes
    facts: Mapping[str, Any]


class Shelf:
    def __init__(self, database: Database, base: Base) -> None:
        self._db, self._base = database, base

    @property
    def champion(self) -> Champion:
        """The version that should serve; the base with number 0 before the first promotion."""
        kept = self._db.state("champion")
        if kept is not None:
            return Champion(**kept)
        return Champion(BASE_VERSION, "", self._base.hash, self._base.target, self._base.kind, 0, "", 0.0)

    def put(self, champion: Champion, entry: Shelved | None, *, registered: bool = False) -> None:
        """Makes `champion` the one that should serve; `entry` is its blob, unless it is on the shelf or the base."""
        with self._db.transaction():
            if entry is not None:
                self._db.run(
                    "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        entry.version,
                        entry.number,
                        entry.blob_hash,
                        entry.blob,
                        json.dumps(dict(entry.facts)),
                        registered,
                    ),
                )
            self._db.keep_state("champion", asdict(champion))
            self._db.run(
                "DELETE FROM versions WHERE registered AND version NOT IN (?, ?) AND version NOT IN "
                "(SELECT version FROM versions ORDER BY number DESC LIMIT ?)",
                (champion.version, champion.previous, KEPT),
            )

    def get(self, version: str) -> Shelved | None:
        return next(iter(self._find("WHERE version = ?", version)), None)

    def artifact(self, version: str) -> Artifact | None:
        """The adapter of a version; None for one that is not here."""
        entry = self.get(version)
        try:
            return open_blob(entry.blob, entry.blob_hash) if entry is not None else None
        except ArtifactError:
            return None

    def learnt_from(self, tenant: str) -> list[str]:
        """Versions that may have learnt from a tenant, newest first."""
        return [entry.version for entry in self._find("ORDER BY number DESC") if blob_learnt_from(entry.blob, tenant)]

    def before(self, version: str) -> list[Shelved]:
        """Versions that were promoted earlier than this one, newest first; none for the base."""
        return self._find(
            "WHERE number < (SELECT number FROM versions WHERE version = ?) ORDER BY number DESC", version
        )

    def numbers(self) -> list[int]:
        """Of everything on the shelf."""
        return [row["number"] for row in self._db.rows("SELECT number FROM versions")]

    def remove(self, versions: Collection[str]) -> None:
        self._db.run_many("DELETE FROM versions WHERE version = ?", [(version,) for version in versions])

    def unregistered(self) -> list[Shelved]:
        """Versions that MLflow has not confirmed, oldest first."""
        return self._find("WHERE NOT registered ORDER BY number")

    def mark_registered(self, version: str) -> None:
        self._db.run("UPDATE versions SET registered = 1 WHERE version = ?", (version,))

    def next_version(self) -> str:
        """A name that no version on the shelf has, and no champion."""
        names = [row["version"] for row in self._db.rows("SELECT version FROM versions")]
        champion = self.champion
        numbers = [int(name[1:]) for name in (*names, champion.version, champion.previous) if name[1:].isdigit()]
        return f"v{max(numbers, default=0) + 1}"

    def _find(self, where: str, *values: str) -> list[Shelved]:
        sql = f"SELECT version, number, blob_hash, blob, facts FROM versions {where}"
        return [Shelved(row[0], row[1], row[2], row[3], json.loads(row[4])) for row in self._db.rows(sql, values)]


def shelve(champion: Champion, blob: bytes, facts: Mapping[str, Any]) -> Shelved:
    return Shelved(champion.version, champion.number, hash_blob(blob), blob, facts)
