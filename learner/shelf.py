"""Versions that were to be served, on this machine's disk: each adapter blob with its facts, and who is the champion.

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
_NAMED = "named"  # highest number in the name of a version that was removed


@dataclass(frozen=True)
class Shelved:
    """A version that the gate or a person let through. `facts` say how it came about and what became of it."""

    version: str
    number: int  # of the pointer that was made for it
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
                self.keep(entry, registered=registered)
            self._db.keep_state("champion", asdict(champion))
            self._db.run(
                "DELETE FROM versions WHERE registered AND version NOT IN (?, ?) AND version NOT IN "
                "(SELECT version FROM versions ORDER BY number DESC LIMIT ?)",
                (champion.version, champion.previous, KEPT),
            )

    def keep(self, entry: Shelved, *, registered: bool = False) -> None:
        """On the shelf, whoever the champion is."""
        facts = json.dumps(dict(entry.facts))
        self._db.run(
            "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?)",
            (entry.version, entry.number, entry.blob_hash, entry.blob, facts, registered),
        )

    def add_facts(self, version: str, facts: Mapping[str, Any]) -> None:
        """What became of it later."""
        entry = self.get(version)
        if entry is not None:
            told = json.dumps({**entry.facts, **facts})
            self._db.run("UPDATE versions SET facts = ? WHERE version = ?", (told, version))

    def get(self, version: str) -> Shelved | None:
        return next(iter(self._find("WHERE version = ?", version)), None)

    def artifact(self, version: str) -> Artifact | None:
        """The adapter of a version; None for one that is not here."""
        entry = self.get(version)
        try:
            return open_blob(entry.blob, entry.blob_hash) if entry is not None else None
        except ArtifactError:
            return None

    def versions(self) -> list[dict[str, Any]]:
        """Number, name and facts of everything on the shelf, oldest first, without the blobs."""
        sql = "SELECT version, number, blob_hash, length(blob), facts FROM versions ORDER BY number"
        return [
            {**json.loads(facts), "version": version, "number": number, "blob": blob_hash, "bytes": size}
            for version, number, blob_hash, size, facts in self._db.rows(sql)
        ]

    def newest_number(self) -> int:
        """The highest number that a pointer of ours has had."""
        staged = self._db.rows("SELECT max(number) FROM versions")[0][0] or 0
        return max(int(staged), self.champion.number)

    def learnt_from(self, tenant: str) -> list[str]:
        """Versions that may have learnt from a tenant, newest first."""
        return [entry.version for entry in self._find("ORDER BY number DESC") if blob_learnt_from(entry.blob, tenant)]

    def held_before(self, version: str, but: Collection[str] = ()) -> Shelved | None:
        """The newest version that had held when this one came, and is none of `but`; None for the base."""
        entry = self.get(version)
        while entry is not None:
            before = self.get(str(entry.facts.get("previous", BASE_VERSION)))
            if before is None or before.number >= entry.number:  # a pointer from elsewhere may name a later one
                return None
            if before.version not in but:
                return before
            entry = before
        return None

    def remove(self, versions: Collection[str]) -> None:
        """What is left names none of them as the one before it, and their names are not given again."""
        for entry in self._find("ORDER BY number"):
            if entry.version not in versions and entry.facts.get("previous") in versions:
                before = self.held_before(entry.version, versions)
                self.add_facts(entry.version, {"previous": before.version if before is not None else BASE_VERSION})
        self._db.keep_state(_NAMED, self._newest_name())
        self._db.run_many("DELETE FROM versions WHERE version = ?", [(version,) for version in versions])

    def unregistered(self) -> list[Shelved]:
        """Versions that MLflow has not confirmed, oldest first."""
        return self._find("WHERE NOT registered ORDER BY number")

    def mark_registered(self, version: str) -> None:
        self._db.run("UPDATE versions SET registered = 1 WHERE version = ?", (version,))

    def next_version(self) -> str:
        """A name that no version on the shelf has or had, and no champion."""
        return f"v{self._newest_name() + 1}"

    def _newest_name(self) -> int:
        names = [row["version"] for row in self._db.rows("SELECT version FROM versions")]
        champion = self.champion
        numbers = [int(name[1:]) for name in (*names, champion.version, champion.previous) if name[1:].isdigit()]
        return max([*numbers, int(self._db.state(_NAMED) or 0)])

    def _find(self, where: str, *values: str) -> list[Shelved]:
        sql = f"SELECT version, number, blob_hash, blob, facts FROM versions {where}"
        return [Shelved(row[0], row[1], row[2], row[3], json.loads(row[4])) for row in self._db.rows(sql, values)]


def shelve(champion: Champion, blob: bytes, facts: Mapping[str, Any]) -> Shelved:
    return Shelved(champion.version, champion.number, hash_blob(blob), blob, facts)
