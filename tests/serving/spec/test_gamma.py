"""The gamma controller's choices at known costs, and the promises it makes about useless and reborn drafters."""

from __future__ import annotations

import random
from itertools import product

import pytest

from serving.spec.gamma import Asking, GammaController, Recent
from tests.serving.spec.controllers import TARGET_S, accepted_of, choose, controller, rate, teach


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_one_request_gets_the_gamma_of_the_closed_form(alpha: float) -> None:
    made = controller()
    teach(made, alpha)
    (gamma,) = choose(made, ["d"], [16])
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
    chosen = choose(made, [f"d{index}" for index in range(3)], [16] * 3)
    best = max(rate(alphas, gammas, draft_s) for gammas in product(range(5), repeat=3))
    found = rate(alphas, tuple(chosen), draft_s)
    assert found * 1.01 >= best or (not any(chosen) and found * 1.02 >= best), "a look at a new request costs a little"


def test_a_useless_drafter_is_left_alone_and_a_good_one_used() -> None:
    made = controller()
    teach(made, 0.0, domain="useless")
    teach(made, 0.9, domain="good")
    assert choose(made, ["useless"], [16]) == [0]
    assert choose(made, ["good"], [16])[0] >= 3
    both = choose(made, ["useless", "good"], [16, 16])
    assert both[0] == 0
    assert both[1] >= 3


def test_a_dear_drafter_is_left_alone_however_good() -> None:
    made = controller(draft_s=2 * TARGET_S)
    teach(made, 0.9)
    assert choose(made, ["d"], [16]) == [0]


def test_what_rounds_cost_is_said_by_gamma_once_it_is_known() -> None:
    assert GammaController(fixed=None, most=3, exploration=0.0).round_seconds(1) == ()
    made = controller()
    prices = made.round_seconds(2)
    assert prices == tuple(made.step_seconds([gamma, gamma]) for gamma in range(made.most + 1))
    assert sorted(prices) == list(prices)


def test_limits_and_the_most_are_kept() -> None:
    made = controller(most=3)
    teach(made, 0.95)
    assert choose(made, ["d"] * 4, [16, 2, 0, -3]) == [3, 2, 0, 0]
    assert choose(controller(fixed=2), ["d"] * 3, [5, 1, -1]) == [2, 1, 0]
    assert choose(controller(fixed=0), ["d"], [5]) == [0]


def test_a_new_drafter_has_the_benefit_of_the_doubt() -> None:
    assert choose(controller(), ["never seen"], [16])[0] >= 1


def test_plain_neighbours_share_the_cost_of_drafting() -> None:
    """Drafting delays everybody in the batch: what pays for one alone may not pay beside fifty."""
    made = controller()
    teach(made, 0.3)
    assert choose(made, ["d"], [16], plain=0) == [1]
    assert choose(made, ["d"], [16], plain=50) == [0]


# --- exploration -----------------------------------------------------------------------------------------------


def speculated(made: GammaController, rounds: int, accepted: float, *, batch: int = 4) -> float:
    """Share of rounds that drafted, with a drafter of which each draft is accepted with chance `accepted`."""
    rng = random.Random(0)
    drafted = 0
    for step in range(rounds // batch):
        if step % 30 == 0:
            asking = [Asking("d", 16, Recent()) for _ in range(batch)]
        for one, gamma in zip(asking, made.choose(asking), strict=True):
            if gamma:
                drafted += 1
                kept = accepted_of(rng, accepted, gamma)
                made.observe("d", kept, min(kept + 1, gamma), one.recent)
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
        for domain, gamma in zip("ab", choose(made, ["a", "b"], [16, 16]), strict=True):
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
    assert choose(made, ["d"], [16]) == [0]
    made.new_version()
    assert choose(made, ["d"], [16])[0] >= 1
    speculated(made, 2000, accepted=0.9)
    assert choose(made, ["d"], [16])[0] >= 3


def test_exploring_waits_for_room() -> None:
    """A request without room for a draft does not use up the looks that are due."""
    made = controller(exploration=0.01)
    teach(made, 0.0)
    for _ in range(5000):
        assert choose(made, ["d"], [0]) == [0]
    assert [choose(made, ["d"], [16])[0] for _ in range(4)] == [1, 1, 1, 1]


def test_one_request_explores_for_all_and_the_one_with_the_least_to_catch_up_with() -> None:
    made = controller(exploration=0.01)
    teach(made, 0.0)
    asking = [Asking("d", 16, Recent(), backlog) for backlog in (200, 30, 90)]
    gammas = [made.choose(asking) for _ in range(6)]
    assert gammas == [[0, 1, 0]] * 4 + [[0, 0, 0]] * 2
    nearer = [*asking, Asking("d", 16, Recent(), 2)]
    for _ in range(200):
        if any(found := made.choose(nearer)):
            break
    assert found == [0, 0, 0, 1]


# --- requests of their own ------------------------------------------------------------------------------------------


def after(made: GammaController, ones: list[Asking], kept: list[bool], rounds: int) -> list[int]:
    """The last choice after so many rounds in which all drafts of a request are kept, or none."""
    for _ in range(rounds):
        gammas = made.choose(ones)
        for one, gamma, good in zip(ones, gammas, kept, strict=True):
            if gamma:
                made.observe(one.domain, gamma if good else 0, gamma if good else 1, one.recent)
    return gammas


def test_a_request_goes_by_its_own_drafts_within_some_rounds() -> None:
    made = controller()
    teach(made, 0.6)
    ones = [Asking("d", 16, Recent()) for _ in range(2)]
    assert made.choose(ones)[0] == made.choose(ones)[1] > 0, "nothing is known but the domain"
    good, bad = after(made, ones, [True, False], 40)
    assert good > bad


def test_a_request_that_does_not_draft_returns_to_its_domain() -> None:
    made = controller()
    teach(made, 0.15, rounds=2000)  # one draft pays from 0.125 on
    one = Asking("d", 16, Recent())
    for _ in range(150):
        one.recent.rate.add(0, 1)
    assert made.choose([one]) == [0]
    for _ in range(200):
        gammas = made.choose([one])
        if gammas != [0]:
            break
    assert gammas == [1], "as the domain says"


def test_a_new_domain_starts_from_all_the_others() -> None:
    made = controller()
    for name in "abc":
        teach(made, 0.0, domain=name)
    assert choose(made, ["new"], [16]) == [0]
    assert made.alpha("new") < 0.05


def test_equally_good_choices_do_not_take_turns() -> None:
    """At the alpha where two depths earn the same, noise alone would change the choice all the time."""
    made, rng = controller(), random.Random(3)
    alpha = min((a / 1000 for a in range(300, 900)), key=lambda a: abs(rate([a], (2,)) / rate([a], (3,)) - 1))
    teach(made, alpha)
    one = Asking("d", 16, Recent())
    changes, last = 0, 0
    for _ in range(400):
        gamma = made.choose([one])[0]
        changes, last = changes + (gamma != last), gamma
        level = alpha + rng.uniform(-0.02, 0.02)
        made.observe("d", level, 1, one.recent)  # type: ignore[arg-type]
    assert last in (2, 3)
    assert changes <= 4
