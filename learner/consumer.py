"""From the trace stream into the buffer: decode, match features, judge, store, and only then acknowledge.

Invariant: a record is acknowledged when it is on disk, or in the dead letters; until then a restart gets it again, and
the buffer knows which it has already. Judging comes before storing, so nothing is learnt from before it was measured.
A record that waits for its features holds up nobody else. One that has expired is acknowledged and forgotten unread,
and those that expire later go from the buffer and from the stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from learner.base import Base
from learner.buffer import Arrival, Buffer, Measured
from learner.example import Example
from learner.features import FeatureInbox, Features, FrozenTarget, rows_of
from learner.measure import Measurer
from shared.artifact import same_target
from shared.counters import Counters
from shared.errors import ConfigError, TraceError
from shared.store import Store
from shared.trace import TraceRecord, decode

NAME = "learner"  # consumer in the stream's group
FEATURE_WAIT_S = 3.0
AT_ONCE = 16  # records read and judged together
WAITING = 64  # records in memory; the rest waits in the stream
EXPIRE_S = 30.0  # between two looks for what has expired
BACKLOG = 24  # with more than this waiting, lost features are not computed again: serving is faster than we are

log = logging.getLogger(__name__)

Listener = Callable[[str, Measured], None]  # domain as kept, and what was measured


@dataclass
class _Waiting:
    stream_id: str
    data: bytes
    record: TraceRecord
    until: float  # monotonic; then it goes on without features
    features: Features | None = None


@dataclass
class Consumer:
    """One reader of the stream; `step` is called by one thread."""

    store: Store
    buffer: Buffer
    measurer: Measurer
    base: Base
    inbox: FeatureInbox
    frozen: FrozenTarget
    recompute_all: bool  # nobody sends features, so they are always computed
    listener: Listener = lambda _domain, _measured: None
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    counters: Counters = field(default_factory=Counters)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _expire_at: float = 0.0  # by `clock`

    def step(self, block_ms: int) -> int:
        """Reads and stores what is there; returns how many records were stored. Raises ServiceDown."""
        if self.clock() >= self._expire_at:
            self._expire()
        room = min(WAITING - len(self._waiting), AT_ONCE)
        if room > 0:
            for stream_id, data in self.store.read_traces(NAME, count=room, block_ms=block_ms):
                self._receive(stream_id, data)
        ready = self._ready()
        stored = 0
        for first in range(0, len(ready), AT_ONCE):
            stored += self._settle(ready[first : first + AT_ONCE])
        return stored

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _receive(self, stream_id: str, data: bytes) -> None:
        if stream_id in self._waiting:
            return
        if self.buffer.knows(stream_id):
            # Stored before a kill or an outage that swallowed the acknowledgement.
            self.counters.add("traces_again")
            self.store.acknowledge([stream_id])
            return
        try:
            record = decode(data)
            check_record(record, self.base)
        except TraceError as error:
            self._bury(stream_id, data, str(error))
            return
        expired = 0 < record.expires_at <= self.now()
        if expired or self.buffer.erased(record):
            self.inbox.take(record.id)
            self.counters.add("traces_expired" if expired else "traces_erased")
            self.store.acknowledge([stream_id])
            return
        self._waiting[stream_id] = _Waiting(stream_id, data, record, self.clock() + FEATURE_WAIT_S)

    def forget(self, tenant: str) -> None:
        """What is in memory. Features whose trace has not come cannot be told apart: all go, and are computed again."""
        for item in [item for item in self._waiting.values() if item.record.tenant == tenant]:
            del self._waiting[item.stream_id]
        self.inbox.clear()

    def _expire(self) -> None:
        """The buffer first: it must not wait for Redis."""
        self.counters.add("traces_expired_in_buffer", self.buffer.expire(self.now()))
        _, unread = self.store.sweep_traces(self.now())
        self.counters.add("traces_expired", unread)
        self._expire_at = self.clock() + EXPIRE_S

    def _ready(self) -> list[_Waiting]:
        """Records that wait no longer, in the order of their arrival."""
        if not self.base.feature_layers:
            return list(self._waiting.values())
        ready = []
        for item in self._waiting.values():
            if item.features is None and item.record.has_features:
                item.features = self._fitting(item.record, self.inbox.take(item.record.id))
                if item.features is None and self.clock() < item.until:
                    continue
            ready.append(item)
        for item in ready:
            if item.features is None and (item.record.has_features or self.recompute_all):
                item.features = self._recomputed(item.record)
        return ready

    def _fitting(self, record: TraceRecord, features: Features | None) -> Features | None:
        if features is None or features.shape == (rows_of(record), self.base.feature_width):
            return features
        self.counters.add("features_misfit")
        log.warning("features of %s have shape %s: they are not its own", record.id, features.shape)
        return None

    def _recomputed(self, record: TraceRecord) -> Features | None:
        if len(self._waiting) > BACKLOG:
            return None
        try:
            features = self.frozen.features(record)
        except (ConfigError, RuntimeError) as error:
            log.error("the features of %s cannot be computed: %s", record.id, error)
            return None
        self.counters.add("features_recomputed")
        return features

    def _settle(self, items: Sequence[_Waiting]) -> int:
        arrivals = self._judged(items)
        self.buffer.add(arrivals)
        for arrival in arrivals:
            del self._waiting[arrival.stream_id]
            self.counters.add("traces_stored" if arrival.measured is not None else "traces_unmeasured")
            if arrival.measured is not None:
                self.listener(self.buffer.domain_of(arrival.record.domain), arrival.measured)
        self.store.acknowledge([arrival.stream_id for arrival in arrivals])
        return len(arrivals)

    def _judged(self, items: Sequence[_Waiting]) -> list[Arrival]:
        """Arrivals in order; what cannot be judged although it could be read is buried alone."""
        able = [item for item in items if item.features is not None or not self.base.feature_layers]
        try:
            measured = self.measurer.measure([_example(item) for item in able])
        except (TraceError, RuntimeError, ValueError, IndexError) as error:
            if len(items) > 1:
                return [arrival for item in items for arrival in self._judged([item])]
            self._bury(items[0].stream_id, items[0].data, f"it cannot be judged: {error}")
            return []
        found = dict(zip([item.stream_id for item in able], measured, strict=True))
        return [
            Arrival(item.stream_id, item.data, item.record, item.features, found.get(item.stream_id)) for item in items
        ]

    def _bury(self, stream_id: str, data: bytes, reason: str) -> None:
        log.warning("trace %s goes to the dead letters: %s", stream_id, reason)
        self.store.dead_letter(stream_id, data, reason)
        self._waiting.pop(stream_id, None)
        self.counters.add("traces_dead")


def _example(item: _Waiting) -> Example:
    return Example(item.record, None if item.features is None else torch.from_numpy(item.features))


def check_record(record: TraceRecord, base: Base) -> None:
    """Raises TraceError for a record that is well-formed and yet none of this target's."""
    if not same_target(record.target, base.target):
        raise TraceError(f"its target is {record.target[:12]}…, ours is {base.target[:12]}…")
    if not len(record.output_ids) or not len(record.prompt_ids):
        raise TraceError("it has no prompt or no output")
    for name, ids, least in (
        ("prompt_ids", record.prompt_ids, 0),
        ("output_ids", record.output_ids, 0),
        ("topk_ids", record.topk_ids, -1),
    ):
        if ids.size and not (ids.min() >= least and ids.max() < base.vocab):
            raise TraceError(f"{name} leave the vocabulary of {base.vocab}")
    if not (np.isfinite(record.probs).all() and (record.probs >= 0).all() and (record.probs <= 1.001).all()):
        raise TraceError("probs are not probabilities")
    if np.isnan(record.topk_logprobs).any() or (record.topk_logprobs > 0.01).any():
        raise TraceError("topk_logprobs are not logarithms of probabilities")
    if (np.diff(record.topk_positions) <= 0).any():
        raise TraceError("topk_positions do not ascend")
    sampling = record.sampling
    numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if not all(isinstance(number, int | float) and 0 <= number < float("inf") for number in numbers):
        raise TraceError(f"{sampling} is no way to sample")
