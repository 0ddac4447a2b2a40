"""The confidence cut reads a drafter's word by how often it was true, and pays."""

from __future__ import annotations

import random

import pytest

from serving.spec.cut import ConfidenceCut
from serving.spec.gamma import Asking, GammaController, Recent


def test_a_new_drafter_is_taken_at_its_word() -> None:
    assert ConfidenceCut().least(0.5) == pytest.approx(0.5)
    assert ConfidenceCut().least(0.0) == 0.0
    assert ConfidenceCut().least(1.1) == 1.0


@pytest.mark.parametrize(("truth", "expected"), [(0.5, 0.8), (1.0, 0.4), (1.6, 0.25)])
def test_a_drafter_too_sure_or_too_modest_is_read_rightly(truth: float, expected: float) -> None:
    """What it calls c holds with chance truth * c; drafting needs 0.4."""
    cut, rng = ConfidenceCut(), random.Random(1)
    for _ in range(20_000):
        chance = rng.random()
        cut.observe(chance, rng.random() < truth * chance)
    assert cut.least(0.4) == pytest.approx(expected, abs=0.13)  # two buckets


TARGET_S, DRAFT_S = 0.020, 0.003


def seconds_a_token(*, cut: bool, sure: float, spread: float, rounds: int = 6000, seed: int = 4) -> float:
    """One request whose positions are hard or easy, sure +- spread with equal chance; the drafter knows which.

    Plain Python: a flat target and a draft that costs 15 % of it.
    """
    rng = random.Random(seed)
    made = GammaController(fixed=None, most=6, exploration=0.0, cut=cut)
    for rows in (1, 64):
        made.costs.by_rows.set(rows, TARGET_S)
    made.costs.draft_first.set(1, DRAFT_S)
    made.costs.draft_next.set(1, DRAFT_S)
    one, spent, tokens = Asking("d", 16, Recent()), 0.0, 0
    for _ in range(rounds):
        (gamma,) = made.choose([one])
        chance, drafted, kept, holds = 1.0, 0, 0, True
        while drafted < gamma and (drafted == 0 or not one.recent.least or chance >= one.recent.least):
            alpha = sure + rng.choice((-spread, spread))
            chance *= alpha
            drafted += 1
            holds = holds and rng.random() < alpha
            kept += holds
        spent += TARGET_S + drafted * DRAFT_S
        tokens += kept + 1
        if drafted:
            made.observe("d", kept, min(kept + 1, drafted), one.recent)
            if one.recent.least:
                made.observe_chance(chance, kept == drafted)
    return spent / tokens


@pytest.mark.parametrize("sure", [0.5, 0.6, 0.7])
def test_it_pays_where_positions_differ(sure: float) -> None:
    """Over four runs, since one differs from the next by half a per cent."""
    with_cut, without = (
        sum(seconds_a_token(cut=cut, sure=sure, spread=0.28, rounds=3000, seed=seed) for seed in range(4))
        for cut in (True, False)
    )
    assert with_cut < 0.99 * without


@pytest.mark.parametrize("sure", [0.1, 0.5, 0.8, 0.97])
def test_it_costs_nothing_where_they_do_not(sure: float) -> None:
    assert seconds_a_token(cut=True, sure=sure, spread=0.0) < 1.01 * seconds_a_token(cut=False, sure=sure, spread=0.0)
