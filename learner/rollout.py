"""Makes a version the champion, and keeps Redis at what was decided.

A decision is on the shelf first, then in Redis, then in MLflow; each later place may be away and is caught up by
`reconcile`. Whoever has the higher number wins: an empty Redis is filled from the shelf, an empty shelf from Redis or
from MLflow. Numbers only ever grow, so a rollback is a promotion of an older version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from learner.base import BASE_VERSION, Base
from learner.journal import Journal
from learner.shelf import Shelf, Shelved, shelve
from shared.artifact import Artifact, check_fit, hash_blob, open_blob, pack_blob
from shared.errors import ArtifactError, ConfigError, ServiceDown, Unreadable
from shared.store import Champion, Store

log = logging.getLogger(__name__)


class Rollout:
    def __init__(self, base: Base, store: Store, shelf: Shelf, journal: Journal) -> None:
        self._base, self._store, self._shelf, self._journal = base, store, shelf, journal
        self._published = 0  # number that Redis is known to have, with its blob
        # What an earlier life had promoted, and may not have told MLflow.
        for entry in shelf.unregistered():
            journal.version(entry)
        if self.champion.number:
            journal.aliases(self.champion.version, self.champion.previous)

    @property
    def champion(self) -> Champion:
        return self._shelf.champion

    def promote(self, artifact: Artifact, facts: Mapping[str, Any]) -> Champion:
        """Replicas will serve `artifact` from now on. Its manifest's version is its name."""
        return self._install(artifact.manifest.version, pack_blob(artifact), facts)

    def force(self, blob: bytes, reason: str) -> Champion:
        """Promotes an adapter that no gate has seen, at an operator's word. Raises ArtifactError if it does not fit."""
        artifact = open_blob(blob)
        check_fit(artifact.manifest, kind=self._base.kind, base=self._base.hash, target=self._base.target)
        facts = {"reason": f"forced: {reason}", "parent": self.champion.version}
        return self._install(self._shelf.next_version(), blob, facts)

    def rollback(self, reason: str) -> Champion:
        """Back to the version before the champion. Raises ConfigError when there is none to go back to."""
        current = self.champion
        if not current.previous:
            raise ConfigError("champion", f"there is no version before {current.version}", "Promote one first.")
        entry = self._shelf.get(current.previous)
        if current.previous != BASE_VERSION and entry is None:
            raise ConfigError("champion", f"{current.previous} is not kept any more", "Promote another version.")
        log.warning("rolled back from %s to %s: %s", current.version, current.previous, reason)
        champion = self._pointer(current.previous, entry.blob_hash if entry is not None else "")
        self._shelf.put(champion, None)
        self._journal.aliases(champion.version, champion.previous)
        self._publish()
        return champion

    def withdraw(self, versions: Collection[str]) -> Champion:
        """Takes versions off the shelf. If the champion is one, the newest before it that is none takes its place.

        The pointer gets a new number in any case, and names none of them: nothing decided earlier may bring one back.
        Decides only: `reconcile` tells Redis.
        """
        current = self.champion
        if not versions:
            return current
        pointer = replace(current, number=max([current.number, *self._shelf.numbers()]) + 1)
        kept = [entry for entry in self._shelf.before(current.version) if entry.version not in versions]
        if current.version in versions:
            version, blob = (kept[0].version, kept[0].blob_hash) if kept else (BASE_VERSION, "")
            pointer, kept = replace(pointer, version=version, blob=blob, created_at=time.time()), kept[1:]
        older = kept[0].version if kept else BASE_VERSION
        pointer = replace(pointer, previous="" if pointer.version == BASE_VERSION else older)
        self._shelf.put(pointer, None)
        self._shelf.remove(versions)
        self._journal.aliases(pointer.version, pointer.previous)
        log.warning("withdrawn: %s; the champion is %s", ", ".join(versions), pointer.version)
        return pointer

    def reconcile(self) -> Champion | None:
        """Brings Redis to the shelf, or the shelf to what is newer; returns a champion that came from elsewhere.

        Raises ServiceDown while Redis is away.
        """
        for version in self._journal.registered():
            self._shelf.mark_registered(version)
        mine = self.champion
        try:
            theirs = self._store.champion()
        except Unreadable as error:
            return self._mend(mine, error)
        if theirs is not None and theirs.number >= mine.number and theirs != mine:
            return self._adopt(theirs)
        if mine.number == 0:
            return self._recover()
        if theirs is None or theirs.number < mine.number or self._published < mine.number:
            self._put(mine)
        return None

    def _install(self, version: str, blob: bytes, facts: Mapping[str, Any]) -> Champion:
        champion = self._pointer(version, hash_blob(blob))
        entry = shelve(champion, blob, {"previous": champion.previous, "created_at": champion.created_at, **facts})
        self._shelf.put(champion, entry)
        self._journal.version(entry)
        self._journal.aliases(champion.version, champion.previous)
        self._publish()
        return champion

    def _pointer(self, version: str, blob_hash: str) -> Champion:
        base, current = self._base, self.champion
        return Champion(
            version=version,
            blob=blob_hash,
            base=base.hash,
            target=base.target,
            kind=base.kind,
            number=current.number + 1,
            previous=current.version,
            created_at=time.time(),
        )

    def _publish(self) -> None:
        try:
            self.reconcile()
        except ServiceDown as error:
            log.warning("the champion is decided but not published yet: %s", error)

    def _put(self, champion: Champion, *, over: bytes = b"") -> None:
        """The blobs before the pointer, so that no replica finds a pointer to nothing."""
        for version in (champion.previous, champion.version):
            entry = self._shelf.get(version)
            if entry is not None:
                self._store.put_blob(entry.blob)
        if self._store.set_champion(champion, over=over):
            self._published = champion.number
            log.info("champion %s (no. %d) is published", champion.version, champion.number)

    def _adopt(self, champion: Champion) -> Champion | None:
        """A newer pointer than ours is followed if it can be, and outnumbered if it cannot."""
        entry = self._shelf.get(champion.version) if champion.version != BASE_VERSION else None
        known = champion.version == BASE_VERSION or (entry is not None and entry.blob_hash == champion.blob)
        if champion.base != self._base.hash:
            log.warning("champion %s in Redis belongs to another base: ours replaces it", champion.version)
        elif known:
            self._shelf.put(champion, None)
            return champion
        elif (entry := self._checked(champion, self._store.get_blob(champion.blob))) is not None:
            self._shelf.put(champion, entry)
            self._journal.version(entry)
            self._journal.aliases(champion.version, champion.previous)
            return champion
        self._shelf.put(replace(self.champion, number=champion.number + 1), None)
        self._put(self.champion)
        return None

    def _mend(self, mine: Champion, error: Unreadable) -> Champion | None:
        """Somebody wrote a pointer by hand: ours replaces it, at once or as soon as there is one."""
        if mine.number == 0:
            return self._recover(over=error.text)
        log.warning("%s; ours replaces it", error)
        self._put(mine, over=error.text)
        return None

    def _recover(self, *, over: bytes = b"") -> Champion | None:
        """Nothing here and nothing in Redis: perhaps MLflow knows a champion of this base."""
        found = self._journal.champion(self._base.hash)
        if found is None:
            return None
        champion, blob = found
        entry = self._checked(champion, blob)
        if entry is None:
            return None
        self._shelf.put(champion, entry, registered=True)
        self._put(champion, over=over)
        log.info("champion %s came back from MLflow", champion.version)
        return champion

    def _checked(self, champion: Champion, blob: bytes | None) -> Shelved | None:
        try:
            if blob is None:
                raise ArtifactError("truncated", "its blob is nowhere to be found")
            artifact = open_blob(blob, champion.blob)
            check_fit(artifact.manifest, kind=self._base.kind, base=self._base.hash, target=self._base.target)
        except ArtifactError as error:
            log.error("champion %s cannot be followed: %s", champion.version, error)
            return None
        return shelve(champion, blob, {"reason": "found", **artifact.manifest.metrics})
