"""The gamma controller over many rounds: against the closed form, the best fixed choice, and plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from serving.spec.costs import CostCurve
from serving.spec.gamma import Asking, GammaController, Recent
from shared.acceptance import expected_tokens
from tests.serving.spec.controllers import DRAFT_S, ROW_S, TARGET_S, accepted_of, choose, controller, teach


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.7, 0.9])
def test_the_speedup_is_that_of_leviathan(alpha: float, cost: float) -> None:
    """One request, flat target: E / (1 + c g), equation 1 and theorem 3.8."""
    made = controller(most=8, draft_s=cost)
    made.costs.by_rows = CostCurve()
    for rows in (1, 100):
        made.costs.by_rows.set(rows, 1.0)
    speedups = [(1 - alpha ** (g + 1)) / (1 - alpha) / (1 + cost * g) for g in range(9)]
    for g in range(9):
        assert expected_tokens(alpha, g) / made.step_seconds([g]) == pytest.approx(speedups[g])
    teach(made, alpha, rounds=2000)
    (gamma,) = choose(made, ["d"], [16])
    assert speedups[gamma] >= max(speedups) / 1.02


def test_a_few_failed_drafts_do_not_turn_a_drafter_off() -> None:
    """They happen by chance, (1 - 0.3)^4 = 0.24 of the time, with a drafter that pays by a sixth."""
    made = controller()
    one = Asking("d", 16, Recent())
    for _ in range(4):
        made.observe("d", 0, 1, one.recent)
    assert made.choose([one]) == [1]


@pytest.mark.parametrize("alpha", [0.2, 0.25, 0.3, 0.4])
def test_an_alpha_a_little_above_break_even_is_not_missed(alpha: float) -> None:
    """Each request starts with a few drafts, whose outcome says little: over many, two thirds of the gain are kept."""
    gains = []
    for seed in range(8):
        auto, plain = simulate(started(), [alpha] * 8, batch=1, prompt=16, seed=seed)
        gains.append(plain / auto - 1)
    best = max(
        expected_tokens(alpha, g) * (TARGET_S + ROW_S) / (TARGET_S + ROW_S * (1 + g) + g * DRAFT_S) for g in (1, 2, 3)
    )
    assert sum(gains) / len(gains) > (best - 1) * 2 / 3


CATCH_UP_S = 0.0002  # a row that the drafter reads late; more than the head of SmolLM2 takes


def simulate(
    made: GammaController, alphas: Sequence[float], *, batch: int, steps: int = 120, prompt: int = 60, seed: int = 5
) -> tuple[float, float]:
    """Seconds a token with the controller and without, over waves of `batch` requests of one alpha a wave.

    The controller learns from noisy measurements; time is counted without the noise.
    """
    rng = random.Random(seed)
    spent = tokens = 0.0
    for alpha in alphas:
        recents = [Recent() for _ in range(batch)]
        unread = [prompt] * batch
        for _ in range(steps):
            asking = [Asking("d", 16, recent, left) for recent, left in zip(recents, unread, strict=True)]
            gammas = made.choose(asking)
            deep = max(gammas)
            target = TARGET_S + ROW_S * (batch + sum(gammas))
            draft = deep * DRAFT_S
            late = sum(left for left, gamma in zip(unread, gammas, strict=True) if gamma)
            spent += target + draft + CATCH_UP_S * late
            made.costs.add_target(batch, batch + sum(gammas), target * rng.lognormvariate(0, 0.1))
            if deep and late <= 16 * sum(gamma > 0 for gamma in gammas):
                made.costs.add_draft(sum(gamma > 0 for gamma in gammas), deep, draft * rng.lognormvariate(0, 0.1))
            for index, gamma in enumerate(gammas):
                kept = accepted_of(rng, alpha, gamma)
                if gamma:
                    made.observe("d", kept, min(kept + 1, gamma), recents[index])
                unread[index] = 0 if gamma else unread[index] + 1  # what a round adds is in the cost of its draft
                tokens += kept + 1
    return spent / tokens, (TARGET_S + ROW_S * batch) / batch


def started() -> GammaController:
    """As after a load: forwards were timed at a few sizes, drafts never."""
    made = GammaController(fixed=None, most=4, exploration=0.005)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        made.costs.by_rows.set(rows, TARGET_S + ROW_S * rows)
    return made


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_a_useless_drafter_costs_less_than_three_per_cent(batch: int) -> None:
    made = started()
    simulate(made, [0.0], batch=batch)  # learning that it is useless is paid for once
    auto, plain = simulate(made, [0.0] * 40, batch=batch)
    assert auto / plain < 1.02, "a third of the allowance is left for what the controller does not see"


@pytest.mark.parametrize("batch", [1, 4])
def test_drifting_alpha_is_followed(batch: int) -> None:
    """Good, useless, good again: about as fast as the best fixed choice for each part, a while after each change."""
    made = started()
    for alpha in (0.85, 0.0, 0.85):
        simulate(made, [alpha] * 8, batch=batch)
        auto, plain = simulate(made, [alpha] * 15, batch=batch)
        best = plain
        for gamma in range(1, 5):
            seconds = TARGET_S + ROW_S * batch * (1 + gamma) + gamma * DRAFT_S
            best = min(best, seconds / batch / expected_tokens(alpha, gamma))
        assert auto / best < 1.04, "each request's own estimate is noisy, and its first draft catches up"


@pytest.mark.parametrize("batch", [1, 8])
def test_slow_first_steps_do_not_turn_a_good_drafter_off(batch: int) -> None:
    made = started()
    made.costs.add_target(batch, batch, 20 * TARGET_S)
    for _ in range(2):
        made.costs.add_draft(batch, 2, 50 * DRAFT_S)
    auto, plain = simulate(made, [0.85] * 8, batch=batch)
    assert auto / plain < 0.7


def test_choosing_is_quick() -> None:
    """Not by the clock, which this machine shares, but by what is looked up: a batch that stays is thought over once in
    some rounds."""
    made = controller()
    teach(made, 0.8)
    asking = [Asking("d", 16, Recent()) for _ in range(16)]
    calls = 0
    curve = made.costs.by_rows.__call__

    class Counted(CostCurve):
        def __call__(self, size: int) -> float:
            nonlocal calls
            calls += 1
            return curve(size)

    made.costs.by_rows = Counted()
    for _ in range(40):
        made.choose(asking)
    assert 0 < calls <= 40 / 4 * (16 * 4 + 5), "one a draft and some for the standing choice, every fourth round"
