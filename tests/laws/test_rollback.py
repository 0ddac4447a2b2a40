"""Law 5: after any number of rejections the caches hold what a fresh computation of the same text would have written.

The target's rows are compared with those of a new engine that reads the committed text in one go; the drafter's with
those of a new drafter at the same version. Slots behind the lengths are nobody's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from serving.drafters.eagle3 import Eagle3Drafter
from serving.drafters.model import ModelDrafter
from serving.engine.engine import Engine, Limits
from serving.engine.sequence import Sequence as Running
from shared.models.paged import PagedKV
from shared.trace import Sampling
from tests.tiny_engine import DRAFTING, Bench, fixed_gamma, request, serve

CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # float32 sums in another order


def rows(kv: PagedKV, table: Sequence[int], count: int) -> Tensor:  # [layers, count, width]
    """Keys and values of positions 0 .. count-1, gathered slot by slot."""
    size = kv.block_size
    slots = torch.tensor([table[i // size] * size + i % size for i in range(count)], dtype=torch.long)
    return torch.stack([pool[slots] for pool in kv._pools.values()])


def drafter_kv(drafter: object) -> PagedKV:
    if isinstance(drafter, Eagle3Drafter):
        return drafter._kv
    assert isinstance(drafter, ModelDrafter)
    return drafter.model.kv


def fresh(bench: Bench, kind: str, version: str, tokens: Sequence[int]) -> tuple[Engine, Running]:
    """An engine that has read `tokens` in one forward and drafted once behind them."""
    target = bench.target()
    drafter = bench.drafter(kind, target)
    if drafter is not None and drafter.version != version:
        bench.swap(drafter)
    engine = Engine(target, drafter, fixed_gamma(1), Limits(512, 1, 512), lambda *_: None)
    sequence = engine.add(request("fresh", tokens, max_tokens=8))
    engine.step()
    assert sequence.kv_len == len(tokens)
    while drafter is not None and sequence.draft.kv_len < len(tokens) - 1:
        engine.step()  # a drafter reads when it drafts; the short one does not draft in every round
    return engine, sequence


@pytest.mark.parametrize("kind", DRAFTING)
def test_caches_equal_fresh_ones_after_rejections(bench: Bench, kind: str) -> None:
    target = bench.target(block_size=8)
    drafter = bench.drafter(kind, target)
    noise = torch.Generator().manual_seed(9)
    asked = [
        request(f"r{i}", torch.randint(3, 320, (5 + 9 * i,), generator=noise).tolist(), sampling, max_tokens=40)
        for i, sampling in enumerate([None, Sampling(), Sampling(temperature=0.6, top_p=0.9)])
    ]
    looked = 0
    steps = 0

    def look(engine: Engine) -> None:
        nonlocal looked, steps
        steps += 1
        if steps % 12:
            return
        for sequence in engine.scheduler.running:
            if sequence.committed < 4:
                continue
            looked += 1
            again, other = fresh(bench, kind, "base", sequence.tokens[: sequence.kv_len])
            torch.testing.assert_close(
                rows(target.kv, sequence.table, sequence.kv_len),
                rows(again.target.kv, other.table, sequence.kv_len),
                **CLOSE,
            )
            known = sequence.draft.kv_len
            assert 0 < known <= sequence.kv_len
            torch.testing.assert_close(
                rows(drafter_kv(drafter), sequence.table, known),
                rows(drafter_kv(again.drafter), other.table, known),
                **CLOSE,
            )

    _, engine = serve(target, drafter, asked, fixed_gamma(3), prefill_tokens=11, between=look)
    accepted, tested = engine.counters.alpha_counts()
    assert looked >= 3
    assert accepted < tested, "nothing was rolled back"


@pytest.mark.parametrize("kind", DRAFTING)
def test_the_targets_cache_is_right_across_swaps(bench: Bench, kind: str) -> None:
    """The drafter's own rows may then be of two versions, but no more than `kv_len` of them are ever trusted."""
    target = bench.target(block_size=8)
    drafter = bench.drafter(kind, target)
    looked = 0

    def look(engine: Engine) -> None:
        nonlocal looked
        bench.swap(engine.drafter)
        for sequence in engine.scheduler.running:
            if sequence.committed in (9, 10, 11):
                looked += 1
                again, other = fresh(bench, "none", "", sequence.tokens[: sequence.kv_len])
                torch.testing.assert_close(
                    rows(target.kv, sequence.table, sequence.kv_len),
                    rows(again.target.kv, other.table, sequence.kv_len),
                    **CLOSE,
                )
                assert sequence.draft.kv_len <= sequence.kv_len

    serve(
        target,
        drafter,
        [request(f"r{i}", [5, 9 + i, 40], max_tokens=20) for i in range(3)],
        fixed_gamma(2),
        between=look,
    )
    assert looked


def test_the_comparison_sees_one_wrong_row(bench: Bench) -> None:
    again, other = fresh(bench, "none", "", list(range(10, 30)))
    right = rows(again.target.kv, other.table, 20)
    changed, another = fresh(bench, "none", "", [*range(10, 29), 31])
    wrong = rows(changed.target.kv, another.table, 20)
    torch.testing.assert_close(right[:, :19], wrong[:, :19], **CLOSE)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(right, wrong, **CLOSE)
