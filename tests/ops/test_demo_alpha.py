"""α is sum over sum on all committed positions; the last third is of the requests sent; intervals are by request."""

from __future__ import annotations

import numpy as np
import pytest

from ops.demo_alpha import (
    Measurement,
    agreement,
    gain_interval,
    last_third,
    live_alpha,
    ratio,
    since_cut,
    static_alpha,
)
from tests.ops.demo_fakes import START, measurement


def _group(live: list[float], static: list[float], positions: int = 100) -> list[Measurement]:
    return [
        measurement(n, positions=positions, live_sum=a * positions, static_sum=b * positions)
        for n, (a, b) in enumerate(zip(live, static, strict=True))
    ]


def test_alpha_weighs_requests_by_their_positions() -> None:
    long, short = (
        measurement(positions=90, live_sum=90, static_sum=45),
        measurement(positions=10, live_sum=0, static_sum=5),
    )
    assert live_alpha([long, short]) == 0.9  # 90 of 100, not the mean of 1 and 0
    assert static_alpha([long, short]) == 0.5
    assert live_alpha([]) is None
    assert ratio(1, 0) is None


@pytest.mark.parametrize(
    ("count", "left"),
    [(9, 3), (10, 4), (1, 1), (2, 1)],  # int(n * 2/3) are left out
)
def test_the_last_third(count: int, left: int) -> None:
    times = [float(n) for n in range(count)]
    assert sum(time >= since_cut(times) for time in reversed(times)) == left


def test_the_third_is_of_the_requests_sent_whether_measured_or_not() -> None:
    # Of nine requests the last one to be measured is the seventh: it alone is in the last third.
    measured = [measurement(n) for n in range(7)]
    found = last_third(measured, {"sql": [START + n for n in range(9)]}, ["sql", "german"])
    assert [m.order for m in found["sql"]] == [6]
    assert found["german"] == []


def test_seeded_requests_are_left_out() -> None:
    found = last_third([measurement(0, seeded=True), measurement(1)], {"sql": [START, START]}, ["sql"])
    assert [m.order for m in found["sql"]] == [1]


def test_a_constant_gain_has_a_narrow_interval_around_itself() -> None:
    rng = np.random.default_rng(1)
    static = rng.uniform(0.2, 0.6, 60)
    low, high = gain_interval([_group(list(static + 0.2), list(static))]) or (0, 0)
    # Requests differ much, but their gains do not: the comparison is on the same requests.
    assert low == pytest.approx(0.2)
    assert high == pytest.approx(0.2)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered, runs = np.random.default_rng(2), 0, 80
    for _ in range(runs):
        gains = rng.normal(0.1, 0.15, 50)
        low, high = gain_interval([_group(list(0.4 + gains), [0.4] * 50)], seed=int(rng.integers(1 << 30))) or (0, 0)
        covered += low <= 0.1 <= high
    # 95 % nominal; a percentile bootstrap of 50 requests has about 93.5 %, whose deviation over 80 runs is 2.8 %.
    assert covered / runs > 0.85


def test_two_domains_are_drawn_each_for_itself() -> None:
    # Without strata the mix of a domain that gains 0 and one that gains 0.4 would vary from draw to draw.
    groups = [_group([0.5] * 30, [0.5] * 30), _group([0.6] * 30, [0.2] * 30)]
    assert gain_interval(groups) == pytest.approx((0.2, 0.2))


def test_the_interval_is_repeatable_and_needs_two_requests() -> None:
    group = _group(list(np.linspace(0.3, 0.9, 20)), [0.4] * 20)
    assert gain_interval([group], seed=5) == gain_interval([group], seed=5)
    assert gain_interval([group], seed=5) != gain_interval([group], seed=6)
    assert gain_interval([group[:1]]) is None
    assert gain_interval([[], []]) is None


def test_agreement_compares_what_was_counted_with_the_estimate_on_the_same_requests() -> None:
    rows = [measurement(n, accepted=20 + n % 3, rounds_accepted=21.0) for n in range(30)]  # 40 tested on both sides
    seeded = measurement(99, seeded=True, accepted=0)
    plain = measurement(98, accepted=0, tested=0)  # gamma was 0: nothing was counted that could be compared
    found = agreement([*rows, seeded, plain])
    assert (found.accepted, found.tested) == (20 * 10 + 21 * 10 + 22 * 10, 30 * 40)
    assert found.expected_accepted == 30 * 21
    low, high = found.difference_ci95 or (1, 1)
    assert low < 0 < high
    assert agreement([]).difference_ci95 is None


def test_agreement_holds_the_rounds_that_were_served_and_leaves_swapped_requests_out() -> None:
    # α is 0.9 where all positions were drafted, and 0.1 where gamma auto gave up early: no contradiction.
    good = [measurement(n, accepted=36, rounds_accepted=36.0) for n in range(20)]
    bad = [measurement(n, accepted=1, tested=10, rounds_accepted=1.0, rounds_tested=10.0) for n in range(20)]
    swapped = measurement(41, accepted=40, rounds_accepted=0.0, rounds_tested=0.0)
    found = agreement([*good, *bad, swapped])
    assert (found.tested, found.expected_tested) == (20 * 50, 20 * 50)
    assert found.difference_ci95 == pytest.approx((0, 0))
