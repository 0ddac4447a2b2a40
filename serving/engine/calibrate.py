"""Times a few forwards at load, so that gamma auto starts from this machine's own costs instead of a guess.

Sizes take turns and the least of each counts: what else the machine does slows some of them down, and none up.
"""

from __future__ import annotations

import time

from serving.spec.gamma import GammaController
from shared.models.paged import PagedModel, Segment

_REPEATS = 4
_SIZES = (1, 2, 4, 8, 16, 32, 64)


def calibrate(target: PagedModel, controller: GammaController, *, rows: int) -> None:
    """Seconds of a forward by rows, up to about `rows`. It writes to block 0, before anybody owns it."""
    block = target.kv.block_size
    sizes = [size for size in _SIZES if size <= max(rows, 2)]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_REPEATS):
        for size in sizes:
            segments = [Segment([0], 0, min(block, size - first)) for first in range(0, size, block)]
            started = time.perf_counter()
            target.forward([0] * size, segments, range(size))
            seconds[size].append(time.perf_counter() - started)
    for size in sizes:
        controller.costs.by_rows.set(size, min(seconds[size]))
