"""The edges of verification and drawing: agreement to the last bit, impossible tokens, empty drafts."""

from __future__ import annotations

import pytest
import torch

from serving.engine.events import RequestStats
from serving.spec.draft import Draft
from serving.spec.stats import StatsKeeper
from serving.spec.verify import draw
from tests.rejection import RoundNoise, verify_rejection

SMALLEST, LARGEST = 2.0**-53, 1 - 2.0**-53


def noise(batch: int, gamma: int, value: float) -> RoundNoise:
    full = torch.full((batch, gamma + 1), value, dtype=torch.float64)
    return RoundNoise(full[:, :gamma], full, full)


@pytest.mark.parametrize("u", [SMALLEST, 0.3, 0.999, LARGEST])
def test_a_drafter_that_equals_the_target_is_never_rejected(u: float) -> None:
    p = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drafts = torch.tensor([[1, 2], [3, 49], [0, 0], [7, 8]])
    verdict = verify_rejection(p, p[:, :2].clone(), drafts, torch.full((4,), 2), noise(4, 2, u))
    assert verdict.accepted.tolist() == [2] * 4


@pytest.mark.parametrize("u", [SMALLEST, 0.5, LARGEST])
def test_what_the_target_never_says_is_never_kept_nor_drawn(u: float) -> None:
    p = torch.tensor([[[0.0, 0.5, 0.0, 0.5, 0.0]] * 2])
    q = torch.tensor([[[0.9, 0.1, 0.0, 0.0, 0.0]]])
    verdict = verify_rejection(p, q, torch.tensor([[0]]), torch.tensor([1]), noise(1, 1, u))
    assert verdict.accepted.item() == 0
    assert verdict.final.item() in (1, 3)


def test_a_point_mass_is_kept_with_p_and_never_recovered() -> None:
    p = torch.tensor([[[0.25, 0.75, 0.0]] * 2])
    q = torch.tensor([[[1.0, 0.0, 0.0]]])
    for u, kept in ((0.24, 1), (0.26, 0)):
        verdict = verify_rejection(p, q, torch.tensor([[0]]), torch.tensor([1]), noise(1, 1, u))
        assert verdict.accepted.item() == kept
    assert verdict.final.item() == 1


def test_without_drafts_the_token_comes_from_p() -> None:
    p = torch.tensor([[[0.1, 0.2, 0.7]]])
    empty = torch.empty(1, 0, dtype=torch.long)
    found = []
    for u in (0.05, 0.25, 0.9):
        verdict = verify_rejection(p, torch.empty(1, 0, 3), empty, torch.tensor([0]), noise(1, 0, u))
        assert verdict.accepted.item() == 0
        found.append(verdict.final.item())
    assert found == [0, 1, 2]


@pytest.mark.parametrize("u", [SMALLEST, LARGEST])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_draw_stays_within_the_support(u: float, scale: float) -> None:
    probs = torch.tensor([[0.0, 0.0, 0.2, 0.5, 0.3, 0.0, 0.0]]) * scale
    assert draw(probs, torch.tensor([u], dtype=torch.float64)).item() == (2 if u < 0.5 else 4)


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.25, 0.5]]).expand(6, -1)
    u = torch.tensor([0.1, 0.2499, 0.25, 0.4999, 0.5, 0.99], dtype=torch.float64)
    assert draw(probs, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_chain_is_a_tree_with_one_branch() -> None:
    draft = Draft.chain([7, 8, 9], None, "v3")
    assert (draft.token_ids, draft.parents, draft.gamma, draft.version) == ((7, 8, 9), (-1, 0, 1), 3, "v3")
    assert Draft.chain([], None, "v3").gamma == 0


def test_stats_are_counts_by_accepted_length_and_by_drafts() -> None:
    keeper = StatsKeeper()
    assert keeper.view(4) == RequestStats(num_spec_tokens=4)
    for drafted, accepted, tested in ((0, 0, 0), (3, 3, 3), (3, 1, 2), (3, 1, 2), (1, 0, 1)):
        keeper.add(drafted=drafted, accepted=accepted, tested=tested, version=f"v{drafted}")
    assert keeper.view(4) == RequestStats(
        num_steps=5,
        num_spec_steps=4,
        num_draft_tokens=10,
        num_accepted_draft_tokens=5,
        tested=8,
        accepted_lengths=(1, 2, 0, 1),
        by_draft_length={1: (1, 0), 3: (0, 2, 0, 1)},
        num_spec_tokens=4,
        drafter_version="v1",
    )
