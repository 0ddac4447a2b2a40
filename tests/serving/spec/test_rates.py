"""Acceptance estimates: a request's own, its domain's, everybody's, in this order, weighed by what is known."""

from __future__ import annotations

import pytest

from serving.spec.rates import Rates, request_rate


def test_nothing_known_is_one_half() -> None:
    assert Rates().alpha("d", request_rate()) == 0.5


def test_each_level_falls_back_on_the_next_by_counts() -> None:
    """strengths 4, 4 and 24: with as many tested positions an estimate is half its own."""
    made, own = Rates(), request_rate()
    made.add("a", 4, 4)
    assert made.alpha("unknown") == pytest.approx((4 + 2) / 8)
    assert made.alpha("a") == pytest.approx((4 + 4 * 0.75) / 8)
    own.add(0, 24)
    assert made.alpha("a", own) == pytest.approx(made.alpha("a") / 2)


def test_the_domain_follows_drift_within_a_hundred_rounds_or_so() -> None:
    made = Rates()
    for _ in range(1000):
        made.add("d", 1, 1)
    assert made.alpha("d") > 0.99
    for _ in range(100):
        made.add("d", 0, 1)
    assert made.alpha("d") == pytest.approx(0.99**100, abs=0.03)


def test_a_request_follows_within_thirty() -> None:
    own = request_rate()
    for _ in range(300):
        own.add(1, 1)
    for _ in range(30):
        own.add(0, 1)
    assert own.alpha(0.5, 0.0) == pytest.approx(0.97**30, abs=1e-3)


def test_what_is_seldom_tried_is_forgotten_sooner_but_not_what_it_said() -> None:
    made = Rates()
    for _ in range(500):
        made.add("d", 0, 1)
    domain, before = made.domain("d"), made.alpha("d")
    for _ in range(5000):
        domain.rate.fade()
    assert made.alpha("d") == pytest.approx(before, abs=0.02)
    for _ in range(8):
        made.add("d", 1, 1)
    assert made.alpha("d") > 0.35, "eight good drafts weigh as much as the five hundred"


def test_domains_that_clients_make_up_do_not_pile_up() -> None:
    made = Rates()
    made.add("kept", 1, 1)
    for number in range(2000):
        made.add(f"d{number}", 0, 1)
        made.domain("kept")
    assert len(made) == 256
    assert made.alpha("kept") > made.alpha("d1999")


def test_a_new_drafter_is_judged_afresh() -> None:
    made = Rates()
    made.add("d", 0, 100)
    made.forget()
    assert made.alpha("d") == 0.5
