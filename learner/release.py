"""How a version comes to serve, and goes again: canary, watch, then all; back by itself; cool-down; pinned.

Whoever wants another version in front of users comes through here, the gate and a person alike. With two replicas or
more one of them goes first. A version that is promoted while another is watched takes its place, and is compared with,
and returns to, the last version that has held. `rollout` does what is decided here; the state outlives a restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from learner.base import BASE_VERSION, Base
from learner.database import Database
from learner.fleet import Fleet, only
from learner.journal import Journal
from learner.report import order_entry, watch_entry
from learner.rollout import Rollout
from learner.shelf import Shelf
from learner.watch import Verdict, Watching, judge, progress
from shared.artifact import Artifact, check_fit, open_blob, pack_blob
from shared.config import RolloutConfig
from shared.errors import ConfigError, ServiceDown
from shared.store import Canary, Champion, Store

CANARY_TTL_S = 30.0  # renewed at each look: a canary does not outlive its learner
GONE_S = 20.0  # without a heartbeat, and the canary is another replica
_STATE = "release"

log = logging.getLogger(__name__)


class Releases:
    """For the loop's thread; `look` is called about once a second."""

    def __init__(
        self,
        base: Base,
        rollout: Rollout,
        shelf: Shelf,
        fleet: Fleet,
        *,
        database: Database,
        store: Store,
        journal: Journal,
        config: RolloutConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._base, self._rollout, self._shelf, self._fleet = base, rollout, shelf, fleet
        self._db, self._store, self._journal, self._config, self._clock = database, store, journal, config, clock
        kept = database.state(_STATE) or {}
        self.pinned = bool(kept.get("pinned"))
        self.cooldown = float(kept.get("cooldown", 0.0))  # tokens that are left of it
        self.rollbacks = int(kept.get("rollbacks", 0))  # by itself
        self.watching = Watching.kept(kept["watching"]) if kept.get("watching") else None
        self._served = fleet.served
        self._canary_seen = clock()
        self.late: dict[str, str] = {}

    @property
    def leading(self) -> Champion:
        """The newest version that anybody serves: what the next attempt continues and must beat."""
        watching = self.watching
        return watching.pointer if watching is not None and watching.canary else self._rollout.champion

    def barred(self) -> str:
        """Why nothing is promoted now, or nothing."""
        if self.pinned:
            return f"pinned: {self._rollout.champion.version} stays until it is unpinned"
        if self.cooldown > 0:
            return f"kept: nothing is promoted for {self.cooldown:.0f} more tokens after a rollback"
        return ""

    # Orders

    def promote(self, artifact: Artifact, facts: Mapping[str, Any]) -> Champion:
        """The gate's decision. `barred` must have been asked."""
        return self._release(artifact.manifest.version, pack_blob(artifact), facts)

    def force(self, blob: bytes, reason: str) -> Champion:
        """An adapter that no gate has seen, at an operator's word. Raises ArtifactError if it does not fit."""
        self._require_unpinned()
        artifact = open_blob(blob)
        check_fit(artifact.manifest, kind=self._base.kind, base=self._base.hash, target=self._base.target)
        facts = {"reason": f"forced: {reason}", "parent": self.leading.version}
        return self._told("forced", self._release(self._shelf.next_version(), blob, facts), reason)

    def return_to(self, version: str, reason: str) -> Champion:
        """A version from the shelf, or the base, at an operator's word. Raises ConfigError for an unknown one."""
        self._require_unpinned()
        pointer = self._rollout.point_to(version, previous=self._held())
        return self._told("promoted", self._bring(pointer), reason)

    def rollback(self, reason: str) -> Champion:
        """The canary is taken back, or all return to the version before. Raises ConfigError when there is none."""
        self._require_unpinned()
        watching = self.watching
        if watching is None or not watching.canary:
            self._rollout.rollback(reason)
        self._end_watch()
        return self._told("rolled back", self._rollout.champion, reason)

    def pin(self, reason: str) -> Champion:
        """The champion stays until `unpin`, whatever attempts and watches find; a canary is taken back."""
        self._end_watch()
        self.pinned = True
        self._keep()
        return self._told("pinned", self._rollout.champion, reason)

    def unpin(self, reason: str) -> Champion:
        self.pinned = False
        self._keep()
        return self._told("unpinned", self._rollout.champion, reason)

    def end_overtaken(self) -> None:
        """Ends the watch if a newer champion is there, as after a withdrawal, or if its version is gone."""
        if self.watching is None:
            return
        pointer, champion = self.watching.pointer, self._rollout.champion
        overtaken = champion.number >= pointer.number and champion != pointer
        if overtaken or (pointer.version != BASE_VERSION and self._shelf.get(pointer.version) is None):
            self._end_watch()

    # The watch

    def look(self) -> None:
        """After the fleet has been looked at. Raises ServiceDown while Redis is away."""
        served, self._served = self._fleet.served - self._served, self._fleet.served
        if self.cooldown > 0 and served:
            self.cooldown = max(self.cooldown - served, 0.0)
            self._keep()
        self.late = self._fleet.note_lag(self._wanted, self._clock())
        watching = self._present()
        if watching is None:
            return
        if watching.canary:
            self._show_canary(watching)
        verdict = judge(watching, self._fleet, self._config, self._clock())
        if verdict.outcome != "goes on":
            self._conclude(watching, verdict)
        elif verdict.looks != watching.looks:
            self.watching = replace(watching, looks=verdict.looks)
            self._keep()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = {"pinned": self.pinned, "rollbacks": self.rollbacks, "late": self.late}
        if self.cooldown > 0:
            found["cooldown_tokens"] = round(self.cooldown)
        if self.watching is not None:
            tested, _ = progress(self.watching, self._fleet)
            found["watch"] = {
                "version": self.watching.pointer.version,
                "against": self.watching.against,
                "canary": self.watching.canary,
                "tested": round(tested),
                "of": self._config.watch_tokens,
            }
        return found

    def _held(self) -> str:
        """The last version that has held, or was never watched."""
        return self.watching.against if self.watching is not None else self._rollout.champion.version

    def _require_unpinned(self) -> None:
        if self.pinned:
            raise ConfigError("champion", f"{self._rollout.champion.version} is pinned", "Unpin it first.")

    def _release(self, version: str, blob: bytes, facts: Mapping[str, Any]) -> Champion:
        with self._db.transaction():  # a kill in between would leave a version that nobody has decided about
            pointer = self._rollout.stage(version, blob, facts, previous=self._held())
            self._decide(pointer)
        return self._publish(pointer)

    def _bring(self, pointer: Champion) -> Champion:
        with self._db.transaction():
            self._decide(pointer)
        return self._publish(pointer)

    def _decide(self, pointer: Champion) -> None:
        """Whether it is watched, and by whom it is served meanwhile; on disk."""
        earlier, replicas = self.watching, sorted(self._fleet.versions)
        if self._config.watch_tokens == 0 or not replicas or pointer.version == pointer.previous:
            self._end_watch()
            self._rollout.decide(pointer)
            return
        start = only(self._fleet.sums, (pointer.version, pointer.previous))
        watching = Watching(pointer, pointer.previous, "", self._clock(), start)
        if len(replicas) > 1 and (earlier is None or earlier.canary):
            canary = earlier.canary if earlier is not None and earlier.canary in replicas else replicas[0]
            watching = replace(watching, canary=canary)
            self._canary_seen = self._clock()
            log.info("version %s goes to replica %s first", pointer.version, canary)
        else:
            before = earlier.before if earlier is not None and earlier.before else self._fleet.recent(pointer.previous)
            watching = replace(watching, before=before)
        self.watching = watching
        self._keep()
        if not watching.canary:
            self._rollout.decide(pointer)

    def _publish(self, pointer: Champion) -> Champion:
        watching = self.watching
        if watching is None or not watching.canary:
            self._rollout.publish()
            return pointer
        try:
            self._show_canary(watching)
        except ServiceDown as error:
            log.warning("the canary is decided but not published yet: %s", error)
        return pointer

    def _present(self) -> Watching | None:
        """The watch, if it still makes sense with the replicas and the champion that there are now."""
        self.end_overtaken()
        watching = self.watching
        if watching is None:
            return None
        replicas = self._fleet.versions
        if not watching.canary or watching.canary in replicas:
            self._canary_seen = self._clock()
        elif replicas and self._clock() - self._canary_seen > GONE_S:
            log.warning("the canary %s is gone: the watch of %s begins anew", watching.canary, watching.pointer.version)
            self.watching = None
            self._bring(watching.pointer)
        return self.watching

    def _show_canary(self, watching: Watching) -> None:
        """Renews it, and its blob if Redis has come back empty."""
        shown = Canary(watching.canary, watching.pointer)
        try:
            missing = self._store.canary() != shown
        except ServiceDown:  # or one that somebody wrote by hand
            missing = True
        if missing:
            self._rollout.put_blob(watching.pointer.version)
        self._store.set_canary(shown, ttl_s=CANARY_TTL_S)

    def _conclude(self, watching: Watching, verdict: Verdict) -> None:
        log.log(logging.WARNING if verdict.outcome == "fell" else logging.INFO, "%s", verdict.reason)
        self._shelf.add_facts(watching.pointer.version, {"watch": verdict.reason})
        if verdict.outcome == "held":
            if watching.canary:
                self._rollout.install(watching.pointer)
        else:
            self.cooldown, self.rollbacks = float(self._config.cooldown_tokens), self.rollbacks + 1
            if not watching.canary:
                self._rollout.rollback(verdict.reason)
        self._end_watch()
        self._journal.attempt(watch_entry(watching, verdict, self._clock()))

    def _end_watch(self) -> None:
        if self.watching is not None and self.watching.canary:
            try:
                self._store.set_canary(None)
            except ServiceDown as error:  # it runs out by itself
                log.warning("the canary is not taken back yet: %s", error)
        self.watching = None
        self._keep()

    def _wanted(self, replica: str) -> tuple[str, int]:
        """Version and number that a replica should serve."""
        watching, champion = self.watching, self._rollout.champion
        pointer = watching.pointer if watching is not None and replica == watching.canary else champion
        return pointer.version or BASE_VERSION, pointer.number

    def _told(self, what: str, pointer: Champion, reason: str) -> Champion:
        self._journal.attempt(order_entry(what, pointer, reason, self._clock()))
        return pointer

    def _keep(self) -> None:
        self._db.keep_state(
            _STATE,
            {
                "pinned": self.pinned,
                "cooldown": self.cooldown,
                "rollbacks": self.rollbacks,
                "watching": self.watching.to_keep() if self.watching is not None else None,
            },
        )
