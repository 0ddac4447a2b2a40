"""The filters against a plain-Python oracle that sorts everything, and the limits that requests rely on."""

from __future__ import annotations

import math

import pytest
import torch

from shared import sampling as module
from shared.sampling import filtered_probs, largest
from shared.trace import Sampling


def oracle(logits: list[float], s: Sampling) -> list[float]:
    """One row, written from the definition: temperature, top-k, top-p, min-p, each by walking a sorted list."""
    if s.temperature == 0:
        return [1.0 if i == logits.index(max(logits)) else 0.0 for i in range(len(logits))]
    top = max(logits)
    weights = [math.exp((x - top) / s.temperature) for x in logits]
    if 0 < s.top_k < len(weights):
        kth = sorted(weights, reverse=True)[s.top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    if s.top_p < 1:
        total, mass, last = sum(weights), 0.0, max(weights)
        for w in sorted(weights, reverse=True):
            if mass >= s.top_p * total:
                break
            mass, last = mass + w, w
        weights = [w if w >= last else 0.0 for w in weights]
    weights = [w if w >= s.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize(
    "s",
    [
        Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.9),
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=500),
        Sampling(top_p=0.9),
        Sampling(temperature=1.7, top_p=0.999),
        Sampling(min_p=0.1),
        Sampling(temperature=0.8, top_k=20, top_p=0.8, min_p=0.05),
        Sampling(temperature=2.0, top_k=20, top_p=0.95),
    ],
    ids=str,
)
@pytest.mark.parametrize("nucleus", [(2, 6), (128, 1024)], ids=["ranks more and more", "ranks all at once"])
def test_equals_the_sorted_definition(s: Sampling, nucleus: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NUCLEUS", nucleus)
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 2
    found = filtered_probs(logits, s)
    expected = torch.tensor([oracle(row, s) for row in logits.tolist()])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    found = filtered_probs(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), Sampling(temperature=0.0))
    assert found.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for s in (Sampling(top_k=2), Sampling(top_p=0.7)):
        assert (filtered_probs(logits, s) > 0).tolist() == [[True, True, True, False]]


def test_masked_ids_are_never_drawn_and_tiny_temperatures_stay_finite() -> None:
    logits = torch.tensor([[float("-inf"), 200.0, -300.0, 199.0]])
    cold = (Sampling(temperature=1e-6), Sampling(temperature=1e-46), Sampling(temperature=5e-324, top_p=1e-300))
    for s in (Sampling(), *cold, Sampling(top_k=4, top_p=0.9999), Sampling(top_p=0.5)):
        found = filtered_probs(logits, s)
        assert found[0, 0] == 0
        assert torch.isfinite(found).all()
        assert found.sum().item() == pytest.approx(1.0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(1))
    logits[0] *= 0  # needs the full sort, the others do not
    s = Sampling(temperature=0.7, top_p=0.95, min_p=0.01)
    together = filtered_probs(logits, s)
    for i in range(9):
        assert torch.equal(filtered_probs(logits[i : i + 1], s)[0], together[i])


@pytest.mark.parametrize("vocab", [5, 128, 4096, 4100, 49152])
def test_the_largest_is_the_first_of_its_row(vocab: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(2)).round(decimals=1)  # many ties
    logits[3] = float("-inf")
    logits[4, vocab // 2 :] = float("-inf")
    logits[5] = 0.0
    logits[6, -1] = 100.0
    assert largest(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(largest(logits.double()), logits.argmax(-1))
