"""What rounds cost: curves, what a batch costs beside its rows, drafts of mixed depth, first measurements."""

from __future__ import annotations

import random

import pytest

from serving.spec.costs import CostCurve, RoundCosts


def test_a_curve_interpolates_and_extends() -> None:
    curve, flat = CostCurve(), CostCurve(flat=True)
    assert not curve.known
    assert curve(7) == 0.0
    for made in (curve, flat):
        made.set(4, 0.4)
    assert (curve(1), curve(4), curve(8), flat(8)) == (0.4, 0.4, pytest.approx(0.8), 0.4)
    curve.set(8, 0.6)
    curve.set(2, 0.3)
    assert [curve(size) for size in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([0.3, 0.3, 0.35, 0.4, 0.5, 0.6, 1.2])


def test_a_curve_follows_a_lasting_change_and_shrugs_at_one_slow_step() -> None:
    curve = CostCurve()
    curve.set(4, 1.0)
    curve.add(4, 100.0)
    assert curve(4) == pytest.approx(1.1)
    for _ in range(60):
        curve.add(4, 3.0)
    assert curve(4) == pytest.approx(3.0, rel=0.02)
    for _ in range(60):
        curve.add(4, 0.5)
    assert curve(4) == pytest.approx(0.5, rel=0.02)


def test_the_first_measurements_of_a_bucket_are_believed_together_and_the_least_counts() -> None:
    curve = CostCurve(flat=True)
    curve.add(8, 9.0)
    assert curve(8) == 9.0, "better than nothing"
    curve.set(1, 0.5)
    assert curve(8) == 0.5, "a neighbour is better than one measurement"
    curve.add(8, 1.0)
    curve.add(8, 4.0)
    assert curve(8) == 1.0


@pytest.mark.parametrize("first", [0.002, 0.006, 0.010])
def test_draft_costs_are_told_apart_from_mixed_depths(first: float) -> None:
    """Only whole drafts are timed; first and further steps follow from drafts of different depth."""
    each, rng, made = 0.002, random.Random(1), RoundCosts()
    for _ in range(400):
        depth = rng.randint(1, 4)
        made.add_draft(4, depth, first + (depth - 1) * each)
    assert made.draft_first(4) == pytest.approx(first, rel=0.1)
    assert made.draft_next(4) == pytest.approx(each, rel=0.25)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_sum_is_right_even_if_only_one_depth_was_seen(depth: int) -> None:
    made = RoundCosts()
    for _ in range(200):
        made.add_draft(2, depth, 0.003 * depth)
    assert made.draft([2] * depth) == pytest.approx(0.003 * depth, rel=0.15)


def loaded() -> RoundCosts:
    """As timed at load: 20 ms and one more a row."""
    made = RoundCosts()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        made.by_rows.set(rows, 0.020 + 0.001 * rows)
    return made


def seconds(made: RoundCosts, batch: int, rows: int) -> float:
    return made.target(batch, rows)


def test_what_a_batch_costs_beside_its_rows_is_learnt_from_plain_steps_alone() -> None:
    """Long contexts: eight caches take 12 ms more. The step of 16 rows, never run since, must not look like a gift."""
    made = loaded()
    for _ in range(100):
        made.add_target(8, 8, 0.040)
    assert seconds(made, 8, 8) == pytest.approx(0.040, rel=0.02)
    assert seconds(made, 8, 16) == pytest.approx(0.048, rel=0.1)
    assert seconds(made, 4, 4) == pytest.approx(0.030, rel=0.15), "half as many caches"


def test_rows_that_cost_otherwise_than_at_load_are_learnt_from_verifying_them() -> None:
    made = loaded()
    for _ in range(200):
        made.add_target(2, 2, 0.022)
        made.add_target(2, 8, 0.060)
    assert seconds(made, 2, 2) == pytest.approx(0.022, rel=0.1)
    assert seconds(made, 2, 8) == pytest.approx(0.060, rel=0.1)


def test_one_batch_size_says_something_of_drafting_for_another() -> None:
    """Eight drafted while the machine was busy, and were switched off; exploring is done by one alone."""
    made = RoundCosts()
    for batch in (1, 8):
        for _ in range(50):
            made.add_draft(batch, 1, 0.020)
    for _ in range(50):
        made.add_draft(1, 1, 0.002)
    assert made.draft([1]) == pytest.approx(0.002, rel=0.1)
    assert made.draft([8]) < 0.010


def test_without_a_timing_at_load_the_first_step_is_what_is_known() -> None:
    made = RoundCosts()
    made.add_target(1, 1, 0.02)
    assert made.target(1, 1) == pytest.approx(0.02)
