"""Attention over a block-paged KV cache.

Owns the layout: a block table names blocks; position i of a sequence is in slot `table[i // size] * size + i % size`,
and a slot holds the keys of all heads, then the values. A plan is built once a step and shared by all layers; its
invariant is that a query sees exactly the keys of its own sequence at its own and earlier positions (or the last
`window` of them). Nobody clears a slot: rolling back is to forget a length. It knows nothing of requests or sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.models.batched_reads import BatchedReads
from shared.models.sequence_reads import SequenceReads

_ALIGNED = 64  # bytes, as torch's own memory: kernels may add up in another order where it is less


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence in a packed batch: positions start .. start+count-1 in the blocks of `table`."""

    table: Sequence[int]
    start: int
    count: int


class PagedKV:
    """One pool for each layer, [slots, kv_heads * (key_dim + value_dim)], allocated when the layer first writes.

    Behind the blocks that can be owned lies one more, `scratch`, for rows that are only padding.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.scratch = num_blocks
        self._pools: dict[int, Tensor] = {}

    def pool(self, layer: int, rows: Tensor) -> Tensor:
        """The pool of a layer; `rows` ([tokens, width]) tell its width, type and device."""
        pool = self._pools.get(layer)
        if pool is None:
            shape = ((self.num_blocks + 1) * self.block_size, rows.shape[1])
            pool = _untouched(shape, rows.dtype) if rows.device.type == "cpu" else rows.new_zeros(shape)
            self._pools[layer] = pool
        return pool

    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())


def _untouched(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Zeros, as `torch.zeros` has them, in memory that the system hands out when it is first written to.

    They must be zeros: whole blocks are read behind a mask, and what is masked is multiplied by 0, which NaN survives.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)  # calloc: no page is there yet
    start = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


class AttentionPlan:
    """Where each row of a packed batch writes its key and which keys it reads."""

    def __init__(self, kv: PagedKV, segments: Sequence[Segment], device: torch.device) -> None:
        self.kv = kv
        size = kv.block_size
        positions: list[int] = []
        slots: list[int] = []
        for segment in segments:
            for position in range(segment.start, segment.start + segment.count):
                positions.append(position)
                slots.append(segment.table[position // size] * size + position % size)
        self.longest = max(segment.start + segment.count for segment in segments)  # positions that any row needs
        self.positions = torch.tensor(positions, device=device)  # [tokens]
        self.slots = torch.tensor(slots, device=device)  # [tokens]
        # A CPU reads each sequence where it lies; a GPU reads all of them in one call.
        reads = SequenceReads if device.type == "cpu" else BatchedReads
        self._reads: SequenceReads | BatchedReads = reads(segments, size, device)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [tokens, heads, key_dim]
        rows: Tensor,  # [tokens, kv_heads * (key_dim + value_dim)] the keys of all heads, then the values
        *,
        kv_heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:  # [tokens, heads * value_dim]
        """Writes the rows' keys and values, then attends."""
        pool = self.kv.pool(layer, rows)
        pool.index_copy_(0, self.slots, rows)
        return self._reads.attend(pool, query, kv_heads=kv_heads, scale=scale, window=window, softcap=softcap)
