"""Each loss against its definition, written out in plain Python over explicit buckets."""

from __future__ import annotations

import math

import pytest
import torch

from learner.losses import LossKind, distil, row_targets

VOCAB, K = 12, 5


def oracle(p: list[float], q: list[float], kind: LossKind) -> float:
    """p and q over the same buckets."""
    mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / max(y, 1e-6)) for x, y in zip(a, b, strict=True) if x > 0)

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    if kind == "jsd":
        return (kl(p, mean) + kl(q, mean)) / 2
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def stored(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    logprobs = (torch.randn(rows, VOCAB, generator=noise) * 2).log_softmax(1)
    top = logprobs.topk(K, dim=1)
    return top.indices, top.values


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_over_the_full_vocabulary_the_rest_is_one_bucket(kind: LossKind) -> None:
    ids, logprobs = stored(8)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    found = distil(logits, row_targets(ids, logprobs, None), kind)
    for m in range(8):
        p = [math.exp(x) for x in logprobs[m].tolist()]
        q_all = logits[m].softmax(0).tolist()
        q = [q_all[i] for i in ids[m].tolist()]
        expected = oracle([*p, 1 - sum(p)], [*q, 1 - sum(q)], kind)
        assert found.loss[m].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert found.overlap[m].item() == pytest.approx(sum(map(min, p, q)), rel=1e-4)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_for_a_head_p_is_restricted_to_its_vocabulary(kind: LossKind) -> None:
    ids, logprobs = stored(8)
    draft = [0, 2, 3, 5, 8, 9]
    column_of = torch.full((VOCAB,), -1)
    column_of[torch.tensor(draft)] = torch.arange(len(draft))
    logits = torch.randn(8, len(draft), generator=torch.Generator().manual_seed(1))
    targets = row_targets(ids, logprobs, column_of)
    found = distil(logits, targets, kind)
    for m in range(8):
        raw = {i: math.exp(x) for i, x in zip(ids[m].tolist(), logprobs[m].tolist(), strict=True) if i in draft}
        kept = sum(raw.values())
        q = logits[m].softmax(0).tolist()
        known = [q[draft.index(i)] for i in raw]
        p = [x / kept for x in raw.values()]
        assert targets.kept[m].item() == pytest.approx(kept, rel=1e-5)
        expected = oracle([*p, 0.0], [*known, 1 - sum(known)], kind)
        assert found.loss[m].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert found.overlap[m].item() == pytest.approx(sum(map(min, raw.values(), known)), rel=1e-4)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_the_best_drafter_is_the_target(kind: LossKind) -> None:
    """Following the gradient leads to q = p, where the overlap is all that is stored."""
    ids, logprobs = stored(4)
    targets = row_targets(ids, logprobs, None)
    logits = torch.zeros(4, VOCAB, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        distil(logits, targets, kind).loss.sum().backward()
        optimizer.step()
    found = distil(logits, targets, kind)
    torch.testing.assert_close(found.overlap, logprobs.exp().sum(1), atol=0.02, rtol=0)


def test_a_row_without_any_id_in_the_vocabulary_gives_zeros_not_nans() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    targets = row_targets(torch.tensor([[0, 1]]), torch.tensor([[-0.7, -0.7]]), torch.tensor([-1, -1, 0, 1]))
    assert targets.kept.item() == 0
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        (distil(logits, targets, kind).loss * targets.kept).sum().backward()  # type: ignore[arg-type]
        assert logits.grad is not None
        assert (logits.grad == 0).all()


def test_fill_columns_change_nothing() -> None:
    ids, logprobs = stored(3)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    wide_ids = torch.cat([ids, torch.full((3, 2), -1)], dim=1)
    wide = torch.cat([logprobs, torch.full((3, 2), float("-inf"))], dim=1)
    plain = distil(logits, row_targets(ids, logprobs, None), "jsd")
    filled = distil(logits, row_targets(wide_ids, wide, None), "jsd")
    torch.testing.assert_close(filled.loss, plain.loss)
