"""What goes to MLflow, in bounded queues with one delivering thread: callers never wait for it.

With MLflow away entries wait, keep the times at which they happened, and are delivered in order when it is back. What
no longer fits, and what MLflow refuses three times, is given up and counted. Without a tracking URI nothing is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from learner.registry import POINTS_AT_ONCE, AttemptEntry, Point, Refused, Registry
from learner.shelf import Shelved
from shared.errors import ServiceDown
from shared.store import Champion

POINTS_KEPT = 50_000  # values that wait
ENTRIES_KEPT = 500  # attempts, versions and aliases that wait
TRIES = 3
_BACKOFF_S = (1.0, 30.0)

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    what: str
    deliver: Callable[[], None]
    done: Callable[[], None] = lambda: None
    tries: int = 0


class Journal:
    """`start` before the first use; methods may be called from any thread."""

    def __init__(self, registry: Registry | None) -> None:
        self._registry = registry
        self._points: deque[Point] = deque()
        self._entries: deque[_Entry] = deque()
        self._registered: deque[str] = deque()
        self._erased: deque[str] = deque()
        self._wanted_base = ""
        self._found: tuple[Champion, bytes] | None = None
        self._looked = False
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._given_up = 0
        self._trouble = "" if registry is not None else "mlflow.tracking_uri is empty: nothing is recorded"
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        if self._registry is not None:
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Delivers what it can within the time and ends the serving run."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def window(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """One window of the serving run."""
        self._keep(self._points, [Point(key, float(value), at, step) for key, value in values.items()], POINTS_KEPT)

    def attempt(self, entry: AttemptEntry) -> None:
        self._add(entry.name, lambda registry: registry.log_attempt(entry))

    def version(self, entry: Shelved) -> None:
        self._add(
            f"version {entry.version}",
            lambda registry: registry.add_version(entry),
            lambda: self._registered.append(entry.version),
        )

    def aliases(self, champion: str, previous: str) -> None:
        self._add(f"champion {champion}", lambda registry: registry.set_aliases(champion, previous))

    def registered(self) -> list[str]:
        """Versions that have arrived in MLflow since the last call."""
        return [self._registered.popleft() for _ in range(len(self._registered))]

    def erase(self, tenant: str) -> None:
        """Deletes the versions that may have learnt from a tenant, after all that waits already has been recorded."""
        self._add(
            f"the erasure of {tenant}",
            lambda registry: registry.erase(tenant),
            lambda: self._erased.append(tenant),
        )

    def erased(self) -> list[str]:
        """Tenants that MLflow has been rid of since the last call."""
        return [self._erased.popleft() for _ in range(len(self._erased))]

    @property
    def records(self) -> bool:
        """Whether there is an MLflow to tell anything."""
        return self._registry is not None

    def champion(self, base: str) -> tuple[Champion, bytes] | None:
        """The champion of this base that MLflow knows. The first call asks; a later one has the answer, once."""
        if not self._wanted_base:
            self._wanted_base = base
            self._wake.set()
        found, self._found = self._found, None
        return found

    def status(self) -> dict[str, Any]:
        waiting = len(self._points) + len(self._entries)
        return {"waiting": waiting, "given_up": self._given_up, "trouble": self._trouble}

    def _add(self, what: str, deliver: Callable[[Registry], None], done: Callable[[], None] = lambda: None) -> None:
        registry = self._registry
        if registry is not None:
            self._keep(self._entries, [_Entry(what, lambda: deliver(registry), done)], ENTRIES_KEPT)

    def _keep(self, queue: deque[Any], items: list[Any], most: int) -> None:
        if self._registry is None:
            return
        with self._lock:
            queue.extend(items)
            while len(queue) > most:
                queue.popleft()
                self._given_up += 1
        self._wake.set()

    def _run(self) -> None:
        assert self._registry is not None, "started only with a registry"
        backoff = _BACKOFF_S[0]
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                self._deliver(self._registry)
                self._trouble, backoff = "", _BACKOFF_S[0]
            except ServiceDown as error:
                if not self._trouble:
                    log.warning("%s; what is to be recorded waits", error)
                self._trouble = str(error)
                if not self._stop.wait(backoff):
                    backoff = min(2 * backoff, _BACKOFF_S[1])
                    self._wake.set()
                    continue
            if self._stop.is_set():
                self._close(self._registry)
                return

    def _deliver(self, registry: Registry) -> None:
        """Everything that waits. Raises ServiceDown, and keeps what was not delivered."""
        if self._wanted_base and not self._looked:
            self._attempt("the champion", lambda: self._look(registry))
            self._looked = True
        tries = 0
        while self._points:
            with self._lock:
                batch = [self._points[i] for i in range(min(len(self._points), POINTS_AT_ONCE))]
            tries += 1
            taken = self._attempt("a window", lambda points=batch: registry.log_points(points))  # type: ignore[misc]
            if taken or tries >= TRIES:
                self._forget(self._points, batch, given_up=not taken)
                tries = 0
        while self._entries:
            entry = self._entries[0]
            entry.tries += 1
            taken = self._attempt(entry.what, entry.deliver)
            if taken:
                entry.done()
            if taken or entry.tries >= TRIES:
                self._forget(self._entries, [entry], given_up=not taken)

    def _look(self, registry: Registry) -> None:
        self._found = registry.find_champion(self._wanted_base)

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Refused as error:
            log.warning("%s is not taken: %s", what, error)
            return False
        return True

    def _forget(self, queue: deque[Any], items: list[Any], *, given_up: bool) -> None:
        """Takes items out that are delivered or given up, unless they have made room for others meanwhile."""
        with self._lock:
            self._given_up += len(items) if given_up else 0
            for item in items:
                if queue and queue[0] is item:
                    queue.popleft()

    def _close(self, registry: Registry) -> None:
        try:
            registry.close()
        except (ServiceDown, Refused) as error:
            log.info("the serving run stays open: %s", error)
