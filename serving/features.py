"""Hands the target's features to the learner through Ray's object store, if there is a learner.

Invariant: `offer` never blocks and never fails: it takes the tensor or refuses it, and what is lost later is counted in
`dropped` too. At most `tokens` rows and `CALLS` unanswered calls are on their way; a call is answered when the learner
has copied or refused what it got. The learner is found by name, again after it was lost. One thread talks to Ray.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LEARNER, NAMESPACE = "redraft-learner", "redraft"
CALLS = 32  # unanswered
LOOK_AGAIN_S = 2.0  # after the learner was not found
POLL_S = 0.1  # between looks at unanswered calls while nothing is offered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Parcel:
    id: str
    features: Tensor  # [rows, layers * hidden] float16 on the CPU

    @property
    def rows(self) -> int:
        return int(self.features.shape[0])


class RayFeatureSink:
    """Calls `features(id, array)` of the actor LEARNER; the array is [rows, layers * hidden] float16."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._rows = 0  # accepted and not yet answered or dropped
        self._dropped = 0
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._unanswered: dict[Any, int] = {}  # answer of a call -> rows
        self._learner: Any = None
        self._look_at = 0.0  # monotonic
        self._thread = threading.Thread(target=self._run, name="features", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Tensors refused or lost so far."""
        return self._dropped

    @property
    def in_flight(self) -> int:
        """Rows taken and not yet answered for."""
        return self._rows

    def offer(self, id: str, features: Tensor) -> bool:
        """Take `features` ([rows, layers * hidden] float16, CPU); False when they are dropped."""
        parcel = _Parcel(id, features)
        with self._lock:
            fits = self._rows + parcel.rows <= self._most
            if fits:
                self._rows += parcel.rows
            else:
                self._dropped += 1
        if fits:
            self._waiting.put(parcel)
        return fits

    def stop(self) -> None:
        """Drop what is still waiting and end the thread."""
        self._waiting.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            try:
                parcel = self._waiting.get(timeout=POLL_S)
            except queue.Empty:
                self._collect(0)
                continue
            if parcel is None:
                return
            try:
                self._send(parcel)
            except Exception:  # Ray itself is away: the request was answered long ago, so this is only a loss
                log.warning("features of %s were lost", parcel.id, exc_info=True)
                self._learner = None
                self._release(parcel.rows, lost=True)

    def _send(self, parcel: _Parcel) -> None:
        import ray

        if len(self._unanswered) >= CALLS:
            self._collect(POLL_S)
        if len(self._unanswered) >= CALLS or not self._find():
            self._release(parcel.rows, lost=True)
            return
        array = ray.put(parcel.features.numpy())
        self._unanswered[self._learner.features.remote(parcel.id, array)] = parcel.rows
        self._collect(0)

    def _find(self) -> bool:
        import ray

        if self._learner is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            try:
                self._learner = ray.get_actor(LEARNER, namespace=NAMESPACE)
            except ValueError:  # no actor of this name
                return False
        return self._learner is not None

    def _collect(self, timeout_s: float) -> None:
        """Settle the calls that have been answered."""
        import ray

        if not self._unanswered:
            return
        answers, _ = ray.wait(list(self._unanswered), num_returns=len(self._unanswered), timeout=timeout_s)
        for answer in answers:
            rows = self._unanswered.pop(answer)
            try:
                ray.get(answer)
                self._release(rows, lost=False)
            except ray.exceptions.RayError as error:
                log.warning("the learner took no features: %s", type(error).__name__)
                self._learner = None
                self._release(rows, lost=True)

    def _release(self, rows: int, *, lost: bool) -> None:
        with self._lock:
            self._rows -= rows
            self._dropped += lost
