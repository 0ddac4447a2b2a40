"""How fast this machine reads memory, by reading: the bound of any decoder that reads its weights for each step."""

from __future__ import annotations

import time

import torch

_BYTES = 2**30  # far beyond the caches of a core; a shared last-level cache may still hold some of it
_ROUNDS = 5


def read_bandwidth(threads: int) -> float:
    """Bytes a second, the best of a few sums over one large tensor."""
    torch.set_num_threads(threads)
    data = torch.ones(_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return _BYTES / best
