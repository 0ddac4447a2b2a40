"""Watches the champion pointer and brings the replica to it: verify, build beside the live copy, swap between rounds.

One thread polls. A replica that is named as the canary serves the canary's version instead, for as long as it is named.
Whatever is wrong with a blob (torn, another hash, another base or target, misshapen), it is refused, logged and counted
by reason, and what serves goes on serving. A refused pointer is not tried again until it changes.
"""

from __future__ import annotations

import logging
import threading
import time

from serving.drafters.load import BASE_VERSION, DrafterSlot, Swap
from serving.engine.engine import Engine
from serving.engine.loop import EngineLoop
from serving.ticker import Ticker
from shared.artifact import open_blob, same_target
from shared.counters import Counters
from shared.errors import ArtifactError, ServiceDown, Unreadable
from shared.histogram import Histogram
from shared.metrics import PAUSE_BOUNDS
from shared.store import Canary, Champion, Store

log = logging.getLogger(__name__)


class ChampionWatcher:
    """Keeps one replica's drafter at the champion."""

    def __init__(self, store: Store, slot: DrafterSlot, loop: EngineLoop, *, replica: str, poll_s: float) -> None:
        self._store, self._slot, self._loop, self._replica = store, slot, loop, replica
        self.counters = Counters()
        self._pauses = Histogram("swap_pause", PAUSE_BOUNDS, self.counters)
        self._seen: Champion | None = None  # the last pointer that was acted on, served or refused
        self._was_canary = False  # so that there may be something to go back from where there is no champion
        self._unreadable = b""  # the last pointer that made no sense
        self._ticker = Ticker("hotswap", self.look, every_s=poll_s)

    def start(self) -> None:
        """Look once before returning, so that a restarted replica does not serve an old version, then keep polling."""
        self.look()
        self._ticker.start()

    def stop(self) -> None:
        self._ticker.stop(wait_s=10.0)

    def look(self) -> None:
        """One poll."""
        try:
            champion = self._wanted()
            if champion is None or champion == self._seen:
                return
            if champion.version == self._slot.drafter.version:
                self._seen = champion
                return
            self._bring(champion)
        except Unreadable as error:
            self._note(error)
        except ServiceDown as error:
            log.debug("the champion pointer cannot be read: %s", error)

    def _wanted(self) -> Champion | None:
        """The canary's version for the replica that is it, the champion for all others; None: whatever serves."""
        # In this order: a canary that has held is the champion before it is taken back.
        canary, champion = self._canary(), self._store.champion()
        newest = champion.number if champion is not None else 0
        if canary is not None and canary.replica == self._replica and canary.pointer.number > newest:
            self._was_canary = True
            return canary.pointer
        if champion is None and self._was_canary:
            slot = self._slot
            return Champion(BASE_VERSION, "", slot.base, slot.target, slot.kind, 0, "", 0.0)
        return champion

    def _canary(self) -> Canary | None:
        """One that makes no sense keeps nobody from the champion."""
        try:
            return self._store.canary()
        except Unreadable as error:
            self._note(error)
            return None

    def _note(self, error: Unreadable) -> None:
        if error.text != self._unreadable:
            self._unreadable = error.text
            self.counters.add("swaps_refused.format")
            log.error("%s; %s goes on", error, self._slot.drafter.version)

    def _bring(self, champion: Champion) -> None:
        try:
            swap = self._prepare(champion)
        except ArtifactError as error:
            self._refuse(champion, error.reason, str(error))
        except ServiceDown:
            raise  # nothing is wrong with it: the next poll tries again
        except Exception as error:  # whoever wrote pointer and blob, this thread must outlive them
            self._refuse(champion, "format", f"it cannot be built ({type(error).__name__}: {error})")
        else:
            if swap is not None:
                self._seen = champion
                self._exchange(swap, champion)

    def _prepare(self, champion: Champion) -> Swap | None:
        slot = self._slot
        if not same_target(champion.target, slot.target):
            raise ArtifactError("target", f"it drafts for target {champion.target[:12]}…, not {slot.target[:12]}…")
        if champion.base != slot.base:
            raise ArtifactError("base", f"it belongs to base {champion.base[:12]}…, not {slot.base[:12]}…")
        if champion.version == BASE_VERSION:
            return slot.prepare(None, BASE_VERSION)
        blob = self._store.get_blob(champion.blob)
        if blob is None:
            log.warning("the blob of drafter %s is not in Redis yet", champion.version)
            return None
        artifact = open_blob(blob, champion.blob)
        slot.check(artifact)
        return slot.prepare(artifact, champion.version)

    def _exchange(self, swap: Swap, champion: Champion) -> None:
        done = threading.Event()

        def between(engine: Engine) -> None:
            started = time.perf_counter()
            swap()
            engine.controller.new_version()
            self._pauses.observe(time.perf_counter() - started)
            self.counters.add("swaps")
            done.set()

        self._loop.between_rounds(between)
        if not done.wait(60):
            log.warning("the engine has not come to the end of a round for 60 s; the swap happens when it does")
        log.info("drafter %s serves", champion.version)

    def _refuse(self, champion: Champion, reason: str, message: str) -> None:
        self._seen = champion
        self.counters.add(f"swaps_refused.{reason}")
        serving = self._slot.drafter.version
        log.error("drafter %s is refused (%s): %s; %s goes on", champion.version, reason, message, serving)
