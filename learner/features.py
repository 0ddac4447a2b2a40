"""The target's features on the learner's side: an inbox that matches them with traces by id, and a frozen target that
computes them again when they were lost.

Features and their trace come by different ways, so either may be first. The inbox is bounded in rows; the oldest make
room. What it hands out fits the record; what does not fit is as good as lost.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.config import Config
from shared.errors import ConfigError
from shared.models.paged import PagedKV, PagedModel, Segment
from shared.models.target import LoadedModel, load_model
from shared.trace import TraceRecord

Features = NDArray[np.float16]  # [prompt + n - 1, layers * target_hidden]

_BLOCK = 16
_CHUNK = 256  # rows of a prefill forward

log = logging.getLogger(__name__)


def rows_of(record: TraceRecord) -> int:
    """Positions that the target has read by the end of the request."""
    return len(record.prompt_ids) + len(record.output_ids) - 1


class FeatureInbox:
    """Filled by the actor's threads, emptied by the loop's."""

    def __init__(self, most_rows: int) -> None:
        self._most, self._rows = most_rows, 0
        self._waiting: OrderedDict[str, Features] = OrderedDict()
        self._lock = threading.Lock()
        self.crowded_out = 0  # features that made room before their trace came

    def put(self, id: str, features: NDArray[np.float16]) -> None:
        """Keeps a copy, since the array may live in memory that is taken back."""
        features = np.array(features, dtype=np.float16, copy=True)
        if features.ndim != 2:
            return
        with self._lock:
            if id in self._waiting:
                self._rows -= len(self._waiting.pop(id))
            self._waiting[id] = features
            self._rows += len(features)
            while self._rows > self._most and self._waiting:
                _, oldest = self._waiting.popitem(last=False)
                self._rows -= len(oldest)
                self.crowded_out += 1

    def take(self, id: str) -> Features | None:
        with self._lock:
            features = self._waiting.pop(id, None)
            self._rows -= 0 if features is None else len(features)
        return features

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._rows = 0

    @property
    def rows(self) -> int:
        return self._rows


class FrozenTarget:
    """Computes features as the replica did: same weights, same weight format. Loaded at the first need."""

    def __init__(self, config: Config, layers: Sequence[int]) -> None:
        self._config, self._layers = config, tuple(layers)
        self._model: PagedModel | None = None

    def features(self, record: TraceRecord) -> Features:
        """One request at a time. Raises ConfigError when the target cannot be loaded here."""
        rows = rows_of(record)
        tokens = np.concatenate([record.prompt_ids, record.output_ids])[:rows].tolist()
        if self._model is None:
            log.info("loading the target, to compute features that were lost")
            self._model = PagedModel(self._load(record), PagedKV(1, _BLOCK), self._layers)
        blocks = -(-rows // _BLOCK)
        if self._model.kv.num_blocks < blocks:
            self._model.kv = PagedKV(blocks, _BLOCK)
        parts = []
        for start in range(0, rows, _CHUNK):
            part = tokens[start : start + _CHUNK]
            forward = self._model.forward(part, [Segment(range(blocks), start, len(part))], [len(part) - 1])
            assert forward.features is not None, "the layers were asked for"
            parts.append(forward.features.half().cpu().numpy())
        return np.concatenate(parts)

    def _load(self, record: TraceRecord) -> LoadedModel:
        learner, target = self._config.learner, self._config.target
        served_in = record.target.partition(":")[2] or "auto"
        for weights in (served_in, "auto"):
            try:
                return load_model(target.model, home=self._config.home_path, device=learner.device, weights=weights)
            except ConfigError as error:
                if error.field != "weights":
                    raise
                log.warning("features are computed in another weight format than the replica's: %s", error)
        raise AssertionError("auto is a weight format of every device")
