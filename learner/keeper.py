"""What keeps one learner a Redis: decides when an actor is started, replaced or left alone, and knows no Ray.

Invariant: no learner is started while another one's heartbeat is in Redis. In an upgrade two clusters live side by side
for minutes, and two learners would split the traces and promote against each other; the new cluster's waits until the
old one's is gone. One that runs with other settings than asked for is replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from learner.loop import NAME
from shared.config import Config
from shared.errors import ServiceDown
from shared.store import Store

PATIENCE_S = 300.0  # with an actor that does not answer: its node may only just be coming

log = logging.getLogger(__name__)


class Actors(Protocol):
    """The learner's actor in this cluster."""

    def exists(self) -> bool: ...

    def settings(self) -> Mapping[str, Any] | None:
        """What the actor runs with; None while it does not answer."""

    def start(self, config: Config) -> None: ...

    def end(self) -> None:
        """In good order if it answers; gone for good in any case."""


class Keeper:
    """`tend` is called every few seconds; a call that changed something is followed by others that look again."""

    def __init__(self, config: Config, actors: Actors, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._actors, self._clock = config, actors, clock
        self._store = Store(config.redis.url, config.redis.prefix)
        self._silent_since: float | None = None
        self.state = "starting"

    def tend(self) -> None:
        """Raises nothing of Redis': without it there is nothing to learn from either."""
        state = self._look()
        if state != self.state:
            log.info("the learner: %s", state)
            self.state = state

    def _look(self) -> str:
        if self._actors.exists():
            return self._keep()
        if not self._config.learner.enabled:
            return "off"
        try:
            if NAME in self._store.statuses():
                return "waiting: another learner's heartbeat is in Redis"
        except ServiceDown as error:
            return f"waiting: {error}"
        self._silent_since = None
        self._actors.start(self._config)
        return "started"

    def _keep(self) -> str:
        if not self._config.learner.enabled:
            self._actors.end()
            return "ended: learner.enabled is false"
        found = self._actors.settings()
        if found is None:
            self._silent_since = self._silent_since or self._clock()
            if self._clock() - self._silent_since < PATIENCE_S:
                return "does not answer, or has no node yet"
            self._silent_since = None
            self._actors.end()
            return f"ended: no answer for {PATIENCE_S:.0f} s"
        self._silent_since = None
        if found != self._config.to_dict():
            self._actors.end()
            return "ended: it ran with other settings"
        return "runs"
