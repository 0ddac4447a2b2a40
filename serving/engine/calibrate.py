"""Times a few forwards at load, so that gamma auto starts from this machine's own costs instead of a guess."""

from __future__ import annotations

import time
from statistics import median

from serving.spec.gamma import GammaController
from shared.models.paged import PagedModel, Segment

_REPEATS = 3
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def calibrate(target: PagedModel, controller: GammaController, *, rows: int) -> None:
    """Seconds of a forward by rows, up to about `rows`. It writes to block 0, before anybody owns it."""
    size = target.kv.block_size
    for count in [size_ for size_ in _SIZES if size_ <= max(rows, 2)]:
        segments = [Segment([0], 0, min(size, count - first)) for first in range(0, count, size)]
        seconds = []
        for _ in range(_REPEATS + 1):
            started = time.perf_counter()
            target.forward([0] * count, segments, range(count))
            seconds.append(time.perf_counter() - started)
        controller.costs.by_rows.set(count, median(seconds[1:]))
