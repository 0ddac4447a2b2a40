"""Who owns which KV block. A block is free or has one or more owners; `check` proves that none is lost or owned twice.

Blocks are shared between the target's and the drafter's caches: both address the same table, each in its own pool.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    """Reference-counted blocks 0 .. num_blocks-1 of `block_size` positions each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def grow(self, table: list[int], positions: int) -> bool:
        """Extend `table` in place to hold `positions`; False, and nothing taken, when too few blocks are free."""
        missing = self.blocks_for(positions) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._owners[block] = 1
            table.append(block)
        return True

    def share(self, blocks: Sequence[int]) -> None:
        """One owner more for each block."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} is free and cannot be shared"
            self._owners[block] += 1

    def release(self, table: list[int]) -> None:
        """One owner fewer for each block of `table`, which is emptied."""
        for block in table:
            assert self._owners[block] > 0, f"block {block} was released twice"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)
        table.clear()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the live `tables` account for every owner of every block."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._owners, "owners and live tables disagree"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {block for block, owners in enumerate(self._owners) if owners == 0}, (
            "free list and owners disagree"
        )
