"""Who owns which KV block, and which text it holds. A block is owned, free, or idle: without owner, but named.

A full block may get a name, the hash of the text up to its end; whoever has the same text shares it instead of
computing it. Idle blocks are taken away, the longest unused first, once no free one is left. Beside its name a block
carries the drafter version that wrote all of its rows in the drafter's pool, since target and drafter address the same
table, each in pools of its own. `check` proves that nothing is lost, owned twice or named twice.

A table grows into the block behind its last one while that is free, and a new one starts in the middle of the longest
free run: attention on CPU reads blocks that follow each other where they lie, and must copy scattered ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

_RUN = re.compile(rb"\x01+")
_EVICTED = 32  # idle blocks freed together, so that there are runs among them


class BlockAllocator:
    """Reference-counted blocks 0 .. num_blocks-1 of `block_size` positions each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._is_free = bytearray(b"\x01" * num_blocks)
        self._num_free = num_blocks
        self._idle: dict[int, None] = {}  # in the order of release
        self._owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._drafter: dict[int, str] = {}  # version whose rows fill the block in the drafter's pool

    @property
    def free(self) -> int:
        """Blocks that nobody owns, idle ones included."""
        return self._num_free + len(self._idle)

    @property
    def named(self) -> int:
        """Blocks that a later request may share."""
        return len(self._name_of)

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def grow(self, table: list[int], positions: int) -> bool:
        """Extend `table` in place to hold `positions`; False, and nothing taken, when too few blocks are free."""
        missing = self.blocks_for(positions) - len(table)
        if missing > self.free:
            return False
        if missing > self._num_free:
            self._evict(max(missing - self._num_free, _EVICTED))
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else self.num_blocks))
        return True

    def share(self, blocks: Iterable[int]) -> None:
        """One owner more for each block."""
        for block in blocks:
            assert self._owners[block] > 0 or block in self._idle, f"block {block} is free and cannot be shared"
            self._idle.pop(block, None)
            self._owners[block] += 1

    def release(self, table: list[int]) -> None:
        """One owner fewer for each block of `table`, which is emptied. Its last blocks become idle before its first,
        since nobody can use a block whose beginning is gone."""
        for block in reversed(table):
            assert self._owners[block] > 0, f"block {block} was released twice"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._name_of:
                self._idle[block] = None
            else:
                self._put_back(block)
        table.clear()

    def name(self, block: int, name: bytes) -> None:
        """The block is full and holds this text. The first of two blocks of the same text keeps the name."""
        assert self._owners[block] > 0, f"block {block} is free and cannot be named"
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of these names, up to the first that is unknown."""
        return [self._block_of[name] for name in takewhile(self._block_of.__contains__, names)]

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of them `free` counts."""
        return sum(1 for block in blocks if block in self._idle)

    def drafter_of(self, block: int) -> str | None:
        """The version that wrote all rows of the block in the drafter's pool, if one did."""
        return self._drafter.get(block)

    def set_drafter(self, block: int, version: str | None) -> None:
        """A drafter of `version` has filled its rows of the block; None: it is about to write some of them."""
        if version is None:
            self._drafter.pop(block, None)
        else:
            assert self._owners[block] > 0, f"block {block} is free and was written to"
            self._drafter[block] = version

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the live `tables` account for every owner of every block."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._owners, "owners and live tables disagree"
        free = {block for block, flag in enumerate(self._is_free) if flag}
        unowned = {block for block, owners in enumerate(self._owners) if owners == 0}
        assert len(free) == self._num_free, "the free blocks are miscounted"
        assert not free & self._idle.keys(), "a block is free and idle"
        assert free | self._idle.keys() == unowned, "free list and owners disagree"
        assert self._idle.keys() == unowned & self._name_of.keys(), "what is idle has a name, what is free has none"
        assert self._block_of == {name: block for block, name in self._name_of.items()}, "a name has two blocks"
        assert not self._drafter.keys() & free, "a free block remembers a drafter"

    def _take(self, wanted: int) -> int:
        """A free block with one owner from now on: the wanted one if it is free."""
        block = wanted if wanted < self.num_blocks and self._is_free[wanted] else self._roomiest()
        self._is_free[block] = False
        self._num_free -= 1
        self._owners[block] = 1
        return block

    def _roomiest(self) -> int:
        """Where a table has the most room to grow without cutting another one off: halfway into the longest run."""
        start, end = max((run.span() for run in _RUN.finditer(self._is_free)), key=lambda span: span[1] - span[0])
        return start if start == 0 else (start + end) // 2

    def _put_back(self, block: int) -> None:
        self._drafter.pop(block, None)
        self._is_free[block] = True
        self._num_free += 1

    def _evict(self, count: int) -> None:
        """Frees the blocks that were idle longest, `count` if there are so many."""
        for block in list(islice(self._idle, count)):
            del self._idle[block], self._block_of[self._name_of.pop(block)]
            self._put_back(block)
