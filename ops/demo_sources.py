"""The demo's windows into a running stack: its Redis, and the learner actor through Ray.

A call to the learner is sent and looked after at the next question, so that a learner in the middle of something slow
holds nobody up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.demo_alpha import Measurement
from ops.demo_windows import Epochs
from ops.stack import ask_ready
from shared.config import Config
from shared.errors import ServiceDown
from shared.store import Champion, Store
from shared.stream import StreamDepth

LEARNER, NAMESPACE = "redraft-learner", "redraft"


class StackSources:
    """For use by one thread."""

    def __init__(self, config: Config, api: str) -> None:
        self._api = api
        self._store = Store(config.redis.url, config.redis.prefix)
        self._learner = LearnerMeasurements() if config.learner.enabled else None

    def counters(self) -> Epochs:
        return self._store.counters()

    def champion(self) -> Champion | None:
        return self._store.champion()

    def statuses(self) -> Mapping[str, Mapping[str, Any]]:
        return self._store.statuses()

    def stream_depth(self) -> StreamDepth:
        return self._store.stream_depth()

    def ready(self) -> tuple[int, str]:
        return ask_ready(self._api)

    def measured(self) -> list[Measurement]:
        return self._learner.new() if self._learner is not None else []

    def close(self) -> None:
        self._store.close()


class LearnerMeasurements:
    """The learner's measurements, each once."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._answer: Any = None  # of the call that is on its way
        self._after = -1  # order of the last one

    def new(self) -> list[Measurement]:
        """Those that have arrived since the last call. Raises ServiceDown when the learner is away."""
        import ray

        try:
            if self._answer is None:
                self._ask()
            ready, _ = ray.wait([self._answer], timeout=0)
            if not ready:
                return []
            answer, self._answer = self._answer, None
            found = [Measurement.of(row) for row in ray.get(answer)]
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor of this name
            self._actor = self._answer = None
            raise ServiceDown(f"no answer ({str(error).splitlines()[0]})") from error
        self._after = max([self._after, *(m.order for m in found)])
        self._ask()
        return found

    def _ask(self) -> None:
        import ray

        if self._actor is None:
            self._actor = ray.get_actor(LEARNER, namespace=NAMESPACE)
        self._answer = self._actor.measurements.remote(self._after)
