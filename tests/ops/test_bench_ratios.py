"""Paired ratios, their bounds, and what α and step costs allow: against numbers that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ops.bench_attainable import attainable, expected_tokens
from ops.bench_line_up import Comparison, comparisons, own_contenders
from ops.bench_measure import Decode, Measure, Times
from ops.bench_ratios import ALL, bootstrap, paired_ratios
from ops.bench_run import Result, rotated

NONE = Times((), (), (), ())
FAST, SLOW = "redraft auto fp32", "redraft plain fp32"
OURS = own_contenders(["plain", "speculative"], ["fp32"], ["auto"], "")


def result(name: str, tok_s: float, *, domain: str = "chat", unit: int = 0, repeat: int = 0, batch: int = 1) -> Result:
    return Result(name, batch, domain, unit, repeat, Measure(100 / tok_s, 100, NONE))


def runs(speed: Callable[[str, int, int], float], units: int = 4, repeats: int = 5) -> list[Result]:
    return [
        result(name, speed(name, unit, repeat), unit=unit, repeat=repeat)
        for repeat in range(repeats)
        for unit in range(units)
        for name in (FAST, SLOW)
    ]


def test_what_prompts_and_moments_share_is_not_in_a_ratio() -> None:
    # The machine is ten times slower in some repeats, prompts differ fivefold; one is always 1.5 times the other.
    moments = (1.0, 0.1, 0.7, 0.3, 0.9)
    results = runs(lambda name, unit, repeat: (1.5 if name == FAST else 1.0) * (unit + 1) * moments[repeat])
    [ratio] = paired_ratios(results, [Comparison(FAST, SLOW)], seed=0)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert ratio.pairs == 20


def test_a_ratio_that_depends_on_the_prompt_has_a_bound_that_says_so() -> None:
    # Repeats agree to the last digit, but prompts do not: repeating more often must not shrink the interval.
    results = runs(lambda name, unit, _: (1 + 0.2 * unit) if name == FAST else 1.0, units=4, repeats=50)
    [ratio] = paired_ratios(results, [Comparison(FAST, SLOW)], seed=0)
    assert ratio.low == pytest.approx(1.0)
    assert ratio.high == pytest.approx(1.6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    trials, covered = 200, 0
    for trial in range(trials):
        grid = np.exp(random.normal(0, 0.1, (30, 1)) + random.normal(0, 0.05, (30, 3)))
        found = bootstrap(grid, lambda drawn: np.median(drawn, axis=1), seed=trial)
        covered += found.low <= 1.0 <= found.high
    # The median of both normals is 1. Binomial of 0.95 in 200 has a deviation of 3.1: three of them below 190.
    assert covered >= 180


def test_a_contender_that_left_is_compared_where_it_was() -> None:
    results = [r for r in runs(lambda *_: 1.0) if r.contender == SLOW or r.repeat < 2]
    [ratio] = paired_ratios(results, [Comparison(FAST, SLOW)], seed=0)
    assert ratio.pairs == 8
    assert paired_ratios([r for r in results if r.contender == SLOW], [Comparison(FAST, SLOW)], seed=0) == []


def test_domains_are_told_apart_and_taken_together() -> None:
    results = [
        result(name, speed if name == FAST else 1.0, domain=domain, repeat=repeat)
        for domain, speed in (("chat", 2.0), ("code", 4.0))
        for name in (FAST, SLOW)
        for repeat in range(3)
    ]
    found = {ratio.domain: ratio.ratio for ratio in paired_ratios(results, [Comparison(FAST, SLOW)], seed=0)}
    assert found == pytest.approx({"chat": 2.0, "code": 4.0, ALL: 3.0})


def test_who_is_compared_with_whom() -> None:
    ours = own_contenders(["plain", "speculative", "useless", "traces"], ["fp16", "int8"], ["auto", "2"], "redis://x")
    pairs = {(c.numerator, c.denominator) for c in comparisons(ours)}
    assert ("redraft gamma 2 int8", "redraft plain int8") in pairs
    assert ("redraft useless fp16", "redraft plain fp16") in pairs
    assert ("redraft auto + traces fp16", "redraft auto fp16") in pairs
    assert not any(one.endswith("int8") != other.endswith("int8") for one, other in pairs)


def test_everybody_is_first_equally_often() -> None:
    orders = [[c.name for c in rotated(OURS, turn)] for turn in range(4)]
    assert [order[0] for order in orders] == [SLOW, FAST, SLOW, FAST]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


# What α and step costs allow


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 4), (0.5, 3), (0.9, 8)])
def test_expected_tokens_are_the_closed_form(alpha: float, gamma: int) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_expected_tokens_when_every_draft_is_kept() -> None:
    assert expected_tokens(1.0, 4) == pytest.approx(5)


def decoded(steps: int, tokens: int, model_s: float, other_s: float, *, gamma: int = 0, accepted: int = 0) -> Measure:
    tested = accepted + (steps if gamma else 0)  # as if each step ended with a rejection
    decode = Decode(
        steps, steps, tokens, model_s + other_s, {"verify": model_s}, steps * gamma, tested, accepted
    )  # fmt: skip
    return Measure(decode.seconds, tokens, NONE, steps=steps, decode=decode, drafted_lengths={str(gamma): steps})


def spoken(auto: Measure, plain: Measure) -> Sequence[Result]:
    return [Result(FAST, 1, "chat", 0, 0, auto), Result(SLOW, 1, "chat", 0, 0, plain)]


def test_a_speedup_is_held_against_what_alpha_and_costs_allow() -> None:
    # Half of the tested are accepted, one draft a step: E = 1.5. A step costs 1.2 plain ones: 1.25 is allowed.
    auto = decoded(100, 150, model_s=1.2, other_s=0.0, gamma=1, accepted=100)
    [entry] = attainable(spoken(auto, decoded(100, 100, model_s=1.0, other_s=0.0)), OURS, seed=0)
    assert entry.alpha == 0.5
    assert (entry.expected_tokens_per_step, entry.cost, entry.allowed) == pytest.approx((1.5, 1.2, 1.25))
    assert (entry.measured, entry.share) == pytest.approx((1.25, 1.0))


def test_what_is_no_forward_lowers_the_share() -> None:
    auto = decoded(100, 150, model_s=1.2, other_s=0.3, gamma=1, accepted=100)
    [entry] = attainable(spoken(auto, decoded(100, 100, model_s=1.0, other_s=0.0)), OURS, seed=0)
    assert entry.share == pytest.approx(0.8)


def test_where_nothing_was_drafted_there_is_nothing_to_hold_against() -> None:
    same = decoded(100, 100, model_s=1.0, other_s=0.0)
    assert attainable(spoken(same, same), OURS, seed=0) == []
