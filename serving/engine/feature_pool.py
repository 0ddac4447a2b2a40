"""The target's features by position, in the same blocks as its KV, so that a shared prefix has features as well.

Without it a request that reuses another's prefix could neither bring the drafter's cache to its own version nor hand
the learner a whole trace. Rows of rejected drafts are overwritten as KV rows are. One row costs
`layers * hidden * itemsize` bytes, about a seventh of the KV row of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shared.models.paged import Segment


class FeaturePool:
    """One row, [layers * hidden], for each slot; allocated when the first is written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots, self._size = num_blocks * block_size, block_size
        self._rows: Tensor | None = None  # [slots, layers * hidden]

    def write(self, segments: Iterable[Segment], features: Tensor) -> None:  # [rows of all segments, layers * hidden]
        """What a forward over `segments` gave."""
        if self._rows is None:
            self._rows = features.new_zeros((self._slots, features.shape[1]))
        slots = [slot for s in segments for slot in self._slots_of(s.table, s.start, s.start + s.count)]
        self._rows.index_copy_(0, torch.tensor(slots, device=features.device), features)

    def read(self, table: Sequence[int], first: int, end: int) -> Tensor:  # [end - first, layers * hidden]
        """A copy of the rows of positions first .. end-1."""
        assert self._rows is not None, "nothing was written yet"
        return self._rows[torch.tensor(self._slots_of(table, first, end), dtype=torch.long, device=self._rows.device)]

    def _slots_of(self, table: Sequence[int], first: int, end: int) -> list[int]:
        size = self._size
        return [table[position // size] * size + position % size for position in range(first, end)]
