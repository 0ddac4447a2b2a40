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
from shared.artifact import check_fit, hash_blob, open_blob
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

    def stage(self, version: str, blob: bytes, facts: Mapping[str, Any], *, previous: str) -> Champion:
        """A new version on the shelf and on its way to MLflow, and the pointer to it, which nobody follows yet."""
        pointer = self._pointer(version, hash_blob(blob), previous)
        entry = shelve(pointer, blob, {"previous": previous, "created_at": pointer.created_at, **facts})
        self._shelf.keep(entry)
        self._journal.version(entry)
        return pointer

    def point_to(self, version: str, *, previous: str) -> Champion:
        """The pointer to a version from the shelf or to the base. Raises ConfigError for one that is not kept."""
        entry = self._shelf.get(version)
        if version != BASE_VERSION and entry is None:
            raise ConfigError("version", f"{version} is not on the shelf", "`redraft drafters list` shows what is.")
        return self._pointer(version, entry.blob_hash if entry is not None else "", previous)

    def install(self, pointer: Champion) -> Champion:
        """All replicas serve what it points to from now on."""
        self.decide(pointer)
        self.publish()
        return pointer

    def decide(self, pointer: Champion) -> None:
        """The first half of `install`, on disk; in the open transaction, if there is one."""
        self._shelf.put(pointer, None)
        self._journal.aliases(pointer.version, pointer.previous)

    def publish(self) -> None:
        """The other half: Redis, now or when it is back."""
        try:
            self.reconcile()
        except ServiceDown as error:
            log.warning("the champion is decided but not published yet: %s", error)

    def rollback(self, reason: str) -> Champion:
        """Back to the version before the champion. Raises ConfigError when there is none to go back to."""
        current = self.champion
        if not current.previous:
            raise ConfigError("champion", f"there is no version before {current.version}", "Promote one first.")
        pointer = self.point_to(current.previous, previous=current.version)
        log.warning("rolled back from %s to %s: %s", current.version, current.previous, reason)
        return self.install(pointer)

    def put_blob(self, version: str) -> None:
        """Into Redis, for whoever is to serve it. Raises ServiceDown."""
        entry = self._shelf.get(version)
        if entry is not None:
            self._store.put_blob(entry.blob)

    def withdraw(self, versions: Collection[str]) -> Champion:
        """Takes versions off the shelf. If the champion is one, the last that had held and is none takes its place.

        The pointer gets a new number in any case, and names none of them: nothing decided earlier may bring one back.
        Decides only: `reconcile` tells Redis.
        """
        current = self.champion
        if not versions:
            return current
        pointer = replace(current, number=self._shelf.newest_number() + 1)
        if current.version in versions:
            clean = self._shelf.held_before(current.version, versions)
            version, blob = (clean.version, clean.blob_hash) if clean is not None else (BASE_VERSION, "")
            pointer = replace(pointer, version=version, blob=blob, created_at=time.time())
        older = self._shelf.held_before(pointer.version, versions)
        previous = older.version if older is not None else BASE_VERSION
        pointer = replace(pointer, previous="" if pointer.version == BASE_VERSION else previous)
        self._shelf.remove(versions)
        self.decide(pointer)
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

    def _pointer(self, version: str, blob_hash: str, previous: str) -> Champion:
        base = self._base
        return Champion(
            version=version,
            blob=blob_hash,
            base=base.hash,
            target=base.target,
            kind=base.kind,
            number=self._shelf.newest_number() + 1,
            previous=previous,
            created_at=time.time(),
        )

    def _put(self, champion: Champion, *, over: bytes = b"") -> None:
        """The blobs before the pointer, so that no replica finds a pointer to nothing."""
        for version in (champion.previous, champion.version):
            self.put_blob(version)
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
        facts = {"reason": "found", "previous": champion.previous, **artifact.manifest.metrics}
        return shelve(champion, blob, facts)
