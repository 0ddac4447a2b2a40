"""Everything one replica needs, built from a Config without Ray: target, drafter, engine loop, outbox, watchers.

Owns their lives: `start` brings them up in order, `stop` ends them in reverse. Without a Redis URL there are no traces
and no swaps, and serving is the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from serving.api.logprobs import TokenTexts
from serving.assembly import assemble
from serving.engine.engine import Engine, Tracing
from serving.engine.events import Event
from serving.engine.loop import EngineLoop
from serving.engine.numerics import numerics_of
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence
from serving.history import Historian
from serving.hotswap import ChampionWatcher
from serving.privacy import Privacy
from serving.publisher import FeatureSink, TracePublisher
from serving.redaction import Redaction, load_redactor
from shared.config import Config
from shared.privacy import hash_share
from shared.store import Store
from shared.trace import TraceRecord


class Replica:
    """One serving process's engine and its threads."""

    def __init__(self, config: Config, replica_id: str, features: FeatureSink | None = None) -> None:
        torch.set_num_threads(config.engine.threads or os.cpu_count() or 1)
        self.config, self.id = config, replica_id
        parts = assemble(config)
        self.loaded, self._slot, self.context = parts.loaded, parts.slot, parts.limits.max_context
        self._store = Store(config.redis.url, config.redis.prefix) if config.redis.url else None
        self._privacy = Privacy.of(config)
        self._redaction: Redaction | None = None
        self.publisher: TracePublisher | None = None
        self.watcher: ChampionWatcher | None = None
        self.historian = Historian(self._store) if self._store is not None else None
        self._engine = Engine(
            parts.paged,
            parts.drafter,
            parts.controller,
            parts.limits,
            self._listen,
            self._tracing(features) if self._store is not None else None,
        )
        self.loop = EngineLoop(self._engine, max_queue=config.engine.max_queue)
        if self._store is not None:
            self.publisher = self._publisher(self._store, features)
            self._redaction = self._redact(self.publisher)
            if self._slot is not None:
                poll_s = config.drafter.swap_poll_s
                self.watcher = ChampionWatcher(self._store, self._slot, self.loop, replica=replica_id, poll_s=poll_s)

    def start(self) -> None:
        """Requests may come once this returns."""
        self.loop.start()
        if self.watcher is not None:
            self.watcher.start()
        if self.historian is not None:
            self.historian.ticker.start()

    def stop(self) -> None:
        """End all threads; what still runs ends as cancelled."""
        if self.historian is not None:
            self.historian.ticker.stop()
        if self.watcher is not None:
            self.watcher.stop()
        self.loop.stop()
        if self._redaction is not None:
            self._redaction.stop()
        if self.publisher is not None:
            self.publisher.stop()
        if self._store is not None:
            self._store.close()

    @property
    def numerics(self) -> str:
        """What decides a seeded answer beside the target's fingerprint."""
        return numerics_of(self.loaded.device)

    def status(self) -> dict[str, Any]:
        """A small heartbeat for `redraft status` and whoever else watches."""
        snapshot = self.loop.snapshot()
        return {
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "blocks_free": snapshot.blocks_free,
            "blocks_total": snapshot.blocks_total,
            "drafter_version": snapshot.drafter_version,
            "draining": snapshot.draining,
            "target": self.loaded.fingerprint,
            "trace_queue": self.publisher.waiting if self.publisher is not None else 0,
            "round_s": [float(f"{seconds:.4g}") for seconds in snapshot.round_s],
        }

    def counters(self) -> dict[str, float]:
        """All that this replica has counted since it started."""
        return self.publisher.totals() if self.publisher is not None else self._counters()

    def _listen(self, sequence: Sequence, event: Event) -> None:
        self.loop.listen(sequence, event)

    def _tracing(self, features: FeatureSink | None) -> Tracing | None:
        trace = self.config.trace
        if not trace.enabled:
            return None
        share = trace.feature_share if features is not None else 0.0

        def wants_features(request: GenerationRequest) -> bool:
            return share > 0 and hash_share(request.id) < share

        return Tracing(
            sink=self._hand_over,
            replica=self.id,
            topk=trace.topk,
            position_share=trace.position_share,
            wants_features=wants_features,
            wants_trace=self._privacy.wants_trace,
        )

    def _hand_over(self, record: TraceRecord, features: Tensor | None) -> None:
        outbox = self._redaction or self.publisher
        assert outbox is not None, "built before the first request"
        outbox.offer(record, features)

    def _redact(self, publisher: TracePublisher) -> Redaction | None:
        """Raises ConfigError for a redactor that cannot be used."""
        if not self.config.privacy.redactor:
            return None
        return Redaction(
            load_redactor(self.config.privacy.redactor),
            TokenTexts(self.loaded.tokenizer),
            publisher.offer,
            queue_size=self.config.trace.queue,
            rows=self.config.trace.feature_tokens,
        )

    def _publisher(self, store: Store, features: FeatureSink | None) -> TracePublisher:
        return TracePublisher(
            store,
            self.id,
            queue_size=self.config.trace.queue,
            stream_bytes=self.config.trace.stream_bytes,
            features=features,
            privacy=self._privacy,
            counters=self._counters,
            status=self.status,
        )

    def _counters(self) -> dict[str, float]:
        swaps = dict(self.watcher.counters.fields) if self.watcher is not None else {}
        redaction = self._redaction.counters if self._redaction is not None else {}
        return {**self.loop.snapshot().counters, **self.loop.latency.counters.fields, **swaps, **redaction}
