"""Paged attention against a loop over rows and heads, in both ways of reading, whatever the block tables look like."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import Tensor

from shared.models.attention import AttentionPlan, PagedKV, Segment
from shared.models.batched_reads import BatchedReads
from shared.models.sequence_reads import SequenceReads

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, VALUE_DIM, BLOCK = 6, 2, 8, 4, 4
# In a row; scattered; backwards; a prompt from its start, longer than what is grouped; a chunk of one behind a cache.
SEGMENTS = [
    Segment([3, 4, 5], 9, 1),
    Segment([20, 8, 14, 9], 11, 5),
    Segment([2, 1, 0], 7, 2),
    Segment(list(range(30, 40)), 0, 37),
    Segment([60, 70, 61, 71, 62, 72, 63, 73, 64, 74, 65], 4, 36),
]
DECODING = [Segment([3, 4, 5], 9, 1), Segment([20, 8, 14, 9], 15, 1), Segment([2, 1], 0, 1)]


def filled(seed: int = 0) -> tuple[PagedKV, Tensor]:
    """A cache whose earlier positions hold something, as after other steps."""
    kv = PagedKV(80, BLOCK)
    width = KV_HEADS * (DIM + VALUE_DIM)
    pool = kv.pool(0, torch.empty(0, width))
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))
    return kv, pool


def rows(segments: list[Segment], seed: int = 1) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    count = sum(segment.count for segment in segments)
    query = torch.randn((count, HEADS, DIM), generator=noise)
    return query, torch.randn((count, KV_HEADS * (DIM + VALUE_DIM)), generator=noise)


def oracle(pool: Tensor, query: Tensor, segments: list[Segment], window: int, softcap: float, scale: float) -> Tensor:
    found, row = [], 0
    for segment in segments:
        for position in range(segment.start, segment.start + segment.count):
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            slots = [segment.table[i // BLOCK] * BLOCK + i % BLOCK for i in seen]
            keys = pool[slots, : KV_HEADS * DIM].view(-1, KV_HEADS, DIM)
            values = pool[slots, KV_HEADS * DIM :].view(-1, KV_HEADS, VALUE_DIM)
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = keys[:, shared] @ query[row, head] * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                found.append(scores.softmax(0) @ values[:, shared])
            row += 1
    return torch.stack(found).view(len(query), HEADS * VALUE_DIM)


@pytest.mark.parametrize("segments", [SEGMENTS, DECODING], ids=["mixed", "decoding"])
@pytest.mark.parametrize("reads", [SequenceReads, BatchedReads])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_every_row_sees_its_own_sequence_up_to_itself(
    segments: list[Segment], reads: type[SequenceReads | BatchedReads], window: int, softcap: float
) -> None:
    kv, pool = filled()
    query, new = rows(segments)
    plan = AttentionPlan(kv, segments, CPU)
    plan._reads = reads(segments, BLOCK, CPU)
    out = plan.attend(0, query, new, kv_heads=KV_HEADS, scale=0.3, window=window, softcap=softcap)
    assert torch.equal(pool[plan.slots], new), "keys and values of the rows are in their slots"
    expected = oracle(pool, query, segments, window, softcap, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


def test_a_sequence_keeps_its_bits_whatever_shares_the_batch() -> None:
    query, new = rows(SEGMENTS)
    kv, _ = filled()
    together = AttentionPlan(kv, SEGMENTS, CPU).attend(0, query, new, kv_heads=KV_HEADS, scale=0.3)
    first = 0
    for segment in SEGMENTS:
        own = slice(first, first + segment.count)
        kv, _ = filled()
        alone = AttentionPlan(kv, [segment], CPU).attend(0, query[own], new[own], kv_heads=KV_HEADS, scale=0.3)
        assert torch.equal(alone, together[own])
        first += segment.count


@pytest.mark.parametrize("window", [0, 20])
def test_a_row_keeps_its_bits_however_many_drafts_follow_it(window: int) -> None:
    """Greedy answers are else not the plain ones: where two tokens are nearly as likely, the last bit decides."""
    block, heads, kv_heads, dim = 16, 9, 3, 64  # as SmolLM2 is served
    noise = torch.Generator().manual_seed(0)
    pool = torch.randn((6 * block, kv_heads * 2 * dim), generator=noise)
    query = torch.randn((6 * block, heads, dim), generator=noise)

    def first_row(start: int, count: int) -> Tensor:
        reads = SequenceReads([Segment(list(range(6)), start, count)], block, CPU)
        rows = query[start : start + count]
        return reads.attend(pool, rows, kv_heads=kv_heads, scale=0.125, window=window, softcap=0.0)[0]

    for start in range(4 * block):
        for drafts in (1, 2, 4, 8):
            assert torch.equal(first_row(start, 1 + drafts), first_row(start, 1)), (start, drafts)


def test_only_scattered_blocks_are_copied() -> None:
    reads = SequenceReads(SEGMENTS, BLOCK, CPU)
    spans, blocks = reads._find(0)
    assert [span.copied for span in spans] == [False, True, True, False, True]
    assert blocks is not None
    assert blocks.tolist() == [20, 8, 14, 9, 2, 1, 0, *SEGMENTS[4].table[:10]], "no block beyond the last position"


def test_a_window_reads_no_block_that_it_does_not_see() -> None:
    spans, _ = SequenceReads([Segment([9, 3, 4, 5], 13, 1)], BLOCK, CPU)._find(6)
    assert (spans[0].length, spans[0].copied) == (8, False), "the scattered first block is out of sight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_is_zeros_that_take_no_memory_until_they_are_written(dtype: torch.dtype) -> None:
    """Masked positions are multiplied by 0, so they must be numbers from the start."""
    before = resident()
    pool = PagedKV(2**13, 16).pool(0, torch.empty(0, 1024, dtype=dtype))
    assert (pool.dtype, pool.shape) == (dtype, ((2**13 + 1) * 16, 1024))
    assert pool.data_ptr() % 64 == 0
    assert not pool[:: 2**12].any()
    # 256 MiB or 512 MiB; looked at were 33 rows, for each of which a page of at most 2 MiB may be there.
    assert resident() - before < 100 * 2**20 < pool.nbytes
    pool[5] = 1
    assert int(pool[4:7].sum()) == 1024


def resident() -> int:
    return int(psutil.Process().memory_info().rss)
