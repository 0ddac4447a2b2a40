"""Blocks have owners, and the allocator can prove it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from serving.engine.kv import BlockAllocator


def test_grow_takes_what_positions_need_or_nothing() -> None:
    allocator, table = BlockAllocator(4, 8), []
    assert allocator.grow(table, 1)
    assert len(table) == 1
    assert allocator.grow(table, 8)
    assert len(table) == 1, "eight positions fit in the first block"
    assert allocator.grow(table, 9)
    assert len(table) == 2
    assert not allocator.grow(table, 33)
    assert (len(table), allocator.free) == (2, 2), "nothing was taken"
    assert allocator.grow(table, 32)
    assert allocator.free == 0
    assert allocator.grow(table, 5), "what is held already is enough"
    allocator.check([table])
    assert sorted(table) == [0, 1, 2, 3]


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    allocator, one = BlockAllocator(3, 4), []
    allocator.grow(one, 8)
    two = list(one)
    allocator.share(two)
    allocator.check([one, two])
    allocator.release(one)
    assert (one, allocator.free) == ([], 1)
    allocator.check([two])
    allocator.release(two)
    assert allocator.free == 3
    allocator.check([])


def test_releasing_twice_and_sharing_what_is_free_are_caught() -> None:
    allocator, table = BlockAllocator(2, 4), []
    allocator.grow(table, 4)
    stale = list(table)
    allocator.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(list(stale))
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        allocator.share(stale)


def test_check_sees_a_lost_table_a_forgotten_owner_and_a_stolen_block() -> None:
    allocator, one, two = BlockAllocator(4, 4), [], []
    allocator.grow(one, 8)
    allocator.grow(two, 4)
    allocator.check([one, two])
    for wrong in ([one], [one, two, two], [one, [one[0]]], []):
        with pytest.raises(AssertionError, match="disagree"):
            allocator.check(wrong)
    allocator._num_free += 1
    with pytest.raises(AssertionError, match="miscounted"):
        allocator.check([one, two])


def test_tables_that_grow_side_by_side_keep_their_blocks_in_a_row() -> None:
    allocator, tables = BlockAllocator(64, 4), [[] for _ in range(4)]
    for positions in range(4, 60, 4):  # to 14 blocks each, 56 of 64 in all
        for table in tables:
            assert allocator.grow(table, positions)
    allocator.check(tables)
    breaks = [sum(b - a != 1 for a, b in pairwise(table)) for table in tables]
    # Halving gives two of the four a quarter of the pool each and the first one half: at most one must move once.
    assert sum(breaks) <= 2


def test_a_full_pool_frees_several_of_the_oldest_idle_blocks_together() -> None:
    allocator, old, new = BlockAllocator(64, 4), [], []
    allocator.grow(old, 64 * 4)
    for index, block in enumerate(old):
        allocator.name(block, bytes([index]))
    allocator.release(old)
    assert allocator.grow(new, 8 * 4)
    assert all(b - a == 1 for a, b in pairwise(new))
    assert len(allocator.find(bytes([index]) for index in range(64))) == 32  # the beginnings of the text stay
    allocator.check([new])


@pytest.mark.parametrize("seed", range(5))
def test_random_use_loses_nothing(seed: int) -> None:
    rng, allocator = random.Random(seed), BlockAllocator(16, 4)
    tables: list[list[int]] = [[] for _ in range(6)]
    for _ in range(500):
        table = rng.choice(tables)
        action = rng.random()
        if action < 0.6:
            allocator.grow(table, rng.randint(0, 40))
        elif action < 0.75 and not table:
            table.extend(rng.choice(tables))
            allocator.share(table)
        else:
            allocator.release(table)
        allocator.check(tables)
