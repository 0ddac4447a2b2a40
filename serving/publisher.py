"""Takes finished traces off the decode path and sends them, the counters and a heartbeat to Redis.

`offer` is called on the stepping thread: it puts into a bounded queue or counts a drop, and never waits. One thread
encodes and sends. With Redis away, records wait in the queue until it is full; then the newest are dropped, counted.
Whether a record may leave is asked again at the moment of sending.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from serving.privacy import Privacy
from shared.errors import ServiceDown
from shared.store import Store
from shared.trace import TraceRecord, encode

log = logging.getLogger(__name__)
_COUNTERS_S = 1.0  # between two writes of the counters
_RETRY_S = 0.5
_STATUS_TTL_S = 10


class FeatureSink(Protocol):
    """Where features go; see `serving.features`."""

    @property
    def dropped(self) -> int: ...

    def offer(self, id: str, features: Tensor) -> bool: ...

    def stop(self) -> None: ...


class TracePublisher:
    """One replica's outbox."""

    def __init__(
        self,
        store: Store,
        replica: str,
        *,
        queue_size: int,
        stream_bytes: int,
        features: FeatureSink | None,
        privacy: Privacy,
        counters: Callable[[], Mapping[str, float]],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._store, self._replica, self._stream_bytes = store, replica, stream_bytes
        self._features, self._privacy, self._counters, self._status = features, privacy, counters, status
        self._epoch = f"{time.time():.3f}"  # another life of the same replica starts counting from 0
        self._queue: queue.Queue[TraceRecord] = queue.Queue(queue_size)
        self._stop = threading.Event()
        self.published = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, record: TraceRecord, features: Tensor | None) -> None:
        """Called on the stepping thread when a request has ended."""
        if features is not None and self._features is not None and self._privacy.policy(record.tenant).traces:
            self._features.offer(record.id, features)
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    @property
    def waiting(self) -> int:
        """Records in the queue."""
        return self._queue.qsize()

    def totals(self) -> dict[str, float]:
        """The engine's counters and the outbox's own."""
        features = self._features.dropped if self._features is not None else 0
        own = {
            "traces_published": self.published,
            "traces_dropped": self.dropped,
            "traces_withheld": self._privacy.withheld,
            "features_dropped": features,
        }
        return {**self._counters(), **own}

    def stop(self) -> None:
        """Send what is queued, within a few seconds, and end the thread."""
        self._stop.set()
        self._thread.join(5)
        if self._features is not None:
            self._features.stop()

    def _run(self) -> None:
        counted_at = 0.0
        while not (self._stop.is_set() and self._queue.empty()):
            try:
                record = self._queue.get(timeout=0.2)
            except queue.Empty:
                record = None
            if record is not None and not self._send(record):
                return
            if time.monotonic() - counted_at >= _COUNTERS_S:
                counted_at = time.monotonic()
                self._count()
        self._count()

    def _send(self, record: TraceRecord) -> bool:
        """Retries until sent; False when told to stop while Redis is away."""
        while True:
            try:
                released = self._privacy.release(record)
                if released is None:
                    return True
                data = encode(released)
            except Exception:  # a defect of ours, in one record: the others and the counters go on
                log.exception("a trace cannot be encoded")
                self.dropped += 1
                return True
            try:
                self._store.append_trace(
                    data, max_bytes=self._stream_bytes, tenant=released.tenant, expires_at=released.expires_at
                )
            except ServiceDown as error:
                log.debug("traces wait: %s", error)
                if self._stop.wait(_RETRY_S):
                    self.dropped += 1 + self._queue.qsize()
                    return False
            else:
                self.published += 1
                return True

    def _count(self) -> None:
        try:
            self._store.put_counters(self._replica, self._epoch, self.totals())
            self._store.put_status(f"replica:{self._replica}", self._status(), ttl_s=_STATUS_TTL_S)
        except ServiceDown as error:
            log.debug("counters wait: %s", error)
