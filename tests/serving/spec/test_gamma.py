"""The gamma controller against closed forms, and the promises it makes about useless and reborn drafters."""

from __future__ import annotations

import random
from itertools import product

import pytest

from serving.spec.gamma import AcceptanceRate, CostCurve, GammaController
from shared.acceptance import expected_tokens

TARGET_S, ROW_S, DRAFT_S = 0.040, 0.001, 0.004  # of a forward, of each row in it, of one drafted token


def controller(
    *, exploration: float = 0.0, fixed: int | None = None, most: int = 4, draft_s: float = DRAFT_S
) -> GammaController:
    """With the costs of one machine measured: one draft step costs the same at every depth and batch."""
    made = GammaController(fixed=fixed, most=most, exploration=exploration)
    for rows in range(1, 200):
        made.target_cost.add(rows, TARGET_S + ROW_S * rows)
    for batch in range(1, 33):
        made.draft_first.add(batch, draft_s)
        made.draft_next.add(batch, draft_s)
    return made


def teach(made: GammaController, alpha: float, *, domain: str = "d", rounds: int = 600) -> None:
    """So many rounds that the prior is forgotten and the estimate is alpha itself."""
    for _ in range(rounds):
        made.observe(domain, alpha, 1)  # type: ignore[arg-type]


def rate(alphas: list[float], gammas: tuple[int, ...], draft_s: float = DRAFT_S) -> float:
    """Tokens a second of a batch, from the formula."""
    tokens = sum(expected_tokens(alpha, gamma) for alpha, gamma in zip(alphas, gammas, strict=True))
    rows = len(gammas) + sum(gammas)
    return tokens / (TARGET_S + ROW_S * rows + max(gammas) * draft_s)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_one_request_gets_the_gamma_of_the_closed_form(alpha: float) -> None:
    made = controller()
    teach(made, alpha)
    (gamma,) = made.choose(["d"], [16])
    best = max(rate([alpha], (g,)) for g in range(5))
    # Leaving 0 must pay two per cent; among the others nothing is given away.
    assert rate([alpha], (gamma,)) == pytest.approx(best) or (gamma == 0 and rate([alpha], (0,)) * 1.02 >= best)


@pytest.mark.parametrize("draft_s", [0.001, 0.004, 0.010])
@pytest.mark.parametrize(
    "alphas", [[0.3, 0.3, 0.7], [0.9, 0.5, 0.5], [0.1, 0.9, 0.3], [0.7, 0.7, 0.7], [0.1, 0.1, 0.5]], ids=str
)
def test_a_batch_is_maximised_as_a_whole(alphas: list[float], draft_s: float) -> None:
    made = controller(draft_s=draft_s)
    for index, alpha in enumerate(alphas):
        teach(made, alpha, domain=f"d{index}")
    chosen = made.choose([f"d{index}" for index in range(3)], [16] * 3)
    best = max(rate(alphas, gammas, draft_s) for gammas in product(range(5), repeat=3))
    found = rate(alphas, tuple(chosen), draft_s)
    assert found == pytest.approx(best) or (not any(chosen) and found * 1.02 >= best)


def test_a_useless_drafter_is_left_alone_and_a_good_one_used() -> None:
    made = controller()
    teach(made, 0.0, domain="useless")
    teach(made, 0.9, domain="good")
    assert made.choose(["useless"], [16]) == [0]
    assert made.choose(["good"], [16])[0] >= 3
    both = made.choose(["useless", "good"], [16, 16])
    assert both[0] == 0
    assert both[1] >= 3


def test_a_dear_drafter_is_left_alone_however_good() -> None:
    made = controller(draft_s=2 * TARGET_S)
    teach(made, 0.9)
    assert made.choose(["d"], [16]) == [0]


def test_limits_and_the_most_are_kept() -> None:
    made = controller(most=3)
    teach(made, 0.95)
    assert made.choose(["d"] * 4, [16, 2, 0, -3]) == [3, 2, 0, 0]
    assert controller(fixed=2).choose(["d"] * 3, [5, 1, -1]) == [2, 1, 0]
    assert controller(fixed=0).choose(["d"], [5]) == [0]


def test_a_new_drafter_has_the_benefit_of_the_doubt() -> None:
    assert controller().choose(["never seen"], [16])[0] >= 1


def test_plain_neighbours_share_the_cost_of_drafting() -> None:
    """Drafting delays everybody in the batch: what pays for one alone may not pay beside fifty."""
    made = controller()
    teach(made, 0.3)
    assert made.choose(["d"], [16], plain=0) == [1]
    assert made.choose(["d"], [16], plain=50) == [0]


def test_the_estimate_follows_drift_within_a_hundred_rounds_or_so() -> None:
    seen = AcceptanceRate()
    assert seen.alpha == 0.5
    for _ in range(1000):
        seen.add(1, 1)
    for _ in range(100):
        seen.add(0, 1)
    assert seen.alpha == pytest.approx(0.99**100, abs=1e-3)


# --- exploration -----------------------------------------------------------------------------------------------


def speculated(made: GammaController, rounds: int, accepted: float, *, batch: int = 4) -> float:
    """Share of rounds that drafted, with a drafter of which each draft is accepted with chance `accepted`."""
    rng = random.Random(0)
    drafted = 0
    for _ in range(rounds // batch):
        for gamma in made.choose(["d"] * batch, [16] * batch):
            if gamma:
                drafted += 1
                kept = 0
                while kept < gamma and rng.random() < accepted:
                    kept += 1
                made.observe("d", kept, min(kept + 1, gamma))
    return drafted / (rounds // batch * batch)


@pytest.mark.parametrize("exploration", [0.005, 0.05])
def test_a_useless_drafter_is_still_tried_in_its_share_of_rounds(exploration: float) -> None:
    made = controller(exploration=exploration)
    teach(made, 0.0)
    drafted = rounds = 0
    for more in (4, 100, 4000, 3996, 20_000):  # at any moment, not only in the long run
        drafted += round(speculated(made, more, accepted=0.0) * more)
        rounds += more
        assert drafted >= exploration * rounds
    assert drafted <= exploration * rounds + 4, "and never more than one look ahead of its share"


def test_every_domain_is_explored_for_itself() -> None:
    made = controller(exploration=0.01)
    drafted = dict.fromkeys("ab", 0)
    for domain in drafted:
        teach(made, 0.0, domain=domain)
    for _ in range(2000):
        for domain, gamma in zip("ab", made.choose(["a", "b"], [16, 16]), strict=True):
            drafted[domain] += gamma > 0
            made.observe(domain, 0, gamma)
    assert all(count >= 20 for count in drafted.values()), drafted


def test_without_exploration_a_useless_drafter_is_never_tried() -> None:
    made = controller(exploration=0.0)
    teach(made, 0.0)
    assert speculated(made, 5000, accepted=1.0) == 0


def test_a_useless_drafter_that_becomes_good_is_switched_on_by_exploration_alone() -> None:
    made = controller(exploration=0.005)
    speculated(made, 4000, accepted=0.0)
    assert speculated(made, 4000, accepted=0.0) == 0.005, "off, but for the exploration"
    speculated(made, 40_000, accepted=0.9)
    assert speculated(made, 400, accepted=0.9) > 0.95


def test_a_new_version_is_tried_at_once() -> None:
    made = controller(exploration=0.0)
    teach(made, 0.0)
    assert made.choose(["d"], [16]) == [0]
    made.new_version()
    assert made.choose(["d"], [16])[0] >= 1
    speculated(made, 2000, accepted=0.9)
    assert made.choose(["d"], [16])[0] >= 3


def test_exploring_waits_for_room() -> None:
    """A request without room for a draft does not use up the looks that are due."""
    made = controller(exploration=0.01)
    teach(made, 0.0)
    for _ in range(5000):
        assert made.choose(["d"], [0]) == [0]
    assert [made.choose(["d"], [16])[0] for _ in range(4)] == [1, 1, 1, 1]


# --- costs -----------------------------------------------------------------------------------------------------


def test_cost_curve_interpolates_and_extends() -> None:
    curve = CostCurve()
    assert not curve.known
    assert curve(7) == 0.0
    curve.add(4, 0.4)
    assert (curve(1), curve(4), curve(8)) == (0.4, 0.4, pytest.approx(0.8))
    curve.add(8, 0.6)
    curve.add(2, 0.3)
    assert [curve(size) for size in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([0.3, 0.3, 0.35, 0.4, 0.5, 0.6, 1.2])


def test_cost_curve_follows_a_lasting_change_and_shrugs_at_one_slow_step() -> None:
    curve = CostCurve()
    curve.add(4, 1.0)
    curve.add(4, 100.0)
    assert curve(4) == pytest.approx(1.1)
    for _ in range(60):
        curve.add(4, 3.0)
    assert curve(4) == pytest.approx(3.0, rel=0.02)
    for _ in range(60):
        curve.add(4, 0.5)
    assert curve(4) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("first", [0.002, 0.006, 0.010])
def test_draft_costs_are_told_apart_from_mixed_depths(first: float) -> None:
    """Only whole drafts are timed; first and further steps follow from drafts of different depth."""
    each, rng = 0.002, random.Random(1)
    made = GammaController(fixed=None, most=4, exploration=0.0)
    for _ in range(400):
        depth = rng.randint(1, 4)
        made.observe_draft(4, depth, first + (depth - 1) * each)
    assert made.draft_first(4) == pytest.approx(first, rel=0.1)
    assert made.draft_next(4) == pytest.approx(each, rel=0.25)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_sum_is_right_even_if_only_one_depth_was_seen(depth: int) -> None:
    made = GammaController(fixed=None, most=4, exploration=0.0)
    for _ in range(200):
        made.observe_draft(2, depth, 0.003 * depth)
    assert made.draft_first(2) + (depth - 1) * made.draft_next(2) == pytest.approx(0.003 * depth, rel=0.15)


def test_step_seconds_adds_target_and_drafts_of_each_depth() -> None:
    made = controller()
    assert made.step_seconds([0, 0], plain=1) == pytest.approx(TARGET_S + 3 * ROW_S)
    assert made.step_seconds([3, 1], plain=1) == pytest.approx(TARGET_S + 7 * ROW_S + 3 * DRAFT_S)
