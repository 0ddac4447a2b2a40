"""A fall that is there is seen; chance, another mix of traffic and a busy machine are none."""

from __future__ import annotations

import numpy as np
import pytest

from learner.comparison import LEAST_REQUESTS, compare_alpha, compare_rounds
from shared.counters import Counters
from shared.live_alpha import Served, add_request, served_by_domain

CONFIDENCE = 0.99


def served(rng: np.random.Generator, requests: int, **alphas: float) -> dict[str, Served]:
    """So many requests of each domain, 10 to 40 tested each."""
    counters = Counters()
    for domain, alpha in alphas.items():
        for _ in range(requests):
            tested = int(rng.integers(10, 40))
            accepted = int(rng.binomial(tested, np.clip(alpha + rng.normal(0, 0.1), 0, 1)))
            add_request(counters, domain, "v", steps=2 * tested, accepted=accepted, tested=tested)
    return served_by_domain(counters.fields, "v")


def test_an_equal_version_seems_to_fall_no_more_often_than_is_said() -> None:
    rng, trials = np.random.default_rng(0), 400
    falls = 0
    for _ in range(trials):
        found = compare_alpha(served(rng, 30, a=0.4, b=0.2), served(rng, 30, a=0.4, b=0.2), CONFIDENCE)
        assert found is not None
        falls += found.alpha.high < 0
    # 1 % and three standard errors of a share over 400 trials
    assert falls / trials <= 0.01 + 3 * (0.01 * 0.99 / trials) ** 0.5


def test_a_fall_that_matters_is_seen() -> None:
    rng = np.random.default_rng(1)
    found = [compare_alpha(served(rng, 40, a=0.3), served(rng, 40, a=0.45), CONFIDENCE) for _ in range(100)]
    # Its standard error is 0.034: the bound at 99 %, 2.4 of them, is below 0 unless chance adds two more (in 2 of 100).
    assert sum(one is not None and one.alpha.high < 0 for one in found) > 90


def test_another_mix_of_domains_is_no_fall() -> None:
    rng = np.random.default_rng(2)
    easy = {**served(rng, 100, a=0.6), **served(rng, 10, b=0.1)}
    hard = {**served(rng, 10, a=0.6), **served(rng, 100, b=0.1)}
    found = compare_alpha(hard, easy, CONFIDENCE)
    assert found is not None
    assert found.alpha.low < 0 < found.alpha.high
    assert sum(s.accepted for s in hard.values()) < 0.5 * sum(s.accepted for s in easy.values())


def test_nothing_is_said_of_few_requests_or_of_domains_that_only_one_has_served() -> None:
    rng = np.random.default_rng(3)
    many, few = served(rng, 30, a=0.4), served(rng, LEAST_REQUESTS - 1, a=0.4)
    assert compare_alpha(many, few, CONFIDENCE) is None
    assert compare_alpha(few, many, CONFIDENCE) is None
    assert compare_alpha(many, served(rng, 30, b=0.4), CONFIDENCE) is None
    assert compare_alpha(many, {}, CONFIDENCE) is None


def windows(rng: np.random.Generator, count: int, draft: float, busy: float = 1.0, depth: float = 2.0) -> np.ndarray:
    """`draft`: a drafted token in forwards of the target; every window has its own pace."""
    rounds = rng.integers(5, 30, count).astype(float)
    pace = 0.02 * busy * rng.lognormal(0, 0.2, count)
    verify = rounds * pace * rng.lognormal(0, 0.05, count)
    return np.stack([rounds, depth * rounds, depth * rounds * draft * pace * rng.lognormal(0, 0.05, count), verify], 1)


def test_dearer_drafts_are_seen_in_rounds_and_a_busy_machine_is_not() -> None:
    rng = np.random.default_rng(4)
    usual = windows(rng, 40, 0.15)
    slower = compare_rounds(windows(rng, 40, 0.30), usual, CONFIDENCE)
    busy = compare_rounds(windows(rng, 40, 0.15, busy=2.0), usual, CONFIDENCE)
    assert slower is not None
    assert busy is not None
    # (1 + 2 * 0.30) / (1 + 2 * 0.15) - 1
    assert slower.value == pytest.approx(0.23, abs=0.03)
    assert 0.1 < slower.low < slower.value < slower.high
    assert busy.low < 0.05


def test_deeper_drafts_are_no_slower_ones() -> None:
    rng = np.random.default_rng(5)
    found = compare_rounds(windows(rng, 40, 0.15, depth=4.0), windows(rng, 40, 0.15, depth=1.0), CONFIDENCE)
    assert found is not None
    assert found.low < 0.05
    assert found.high > -0.05
    assert compare_rounds(windows(rng, 40, 0.15), windows(rng, LEAST_REQUESTS - 1, 0.15), CONFIDENCE) is None
