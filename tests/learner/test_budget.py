"""The budget holds in every span of time, and what learning costs is set against what it saves."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from learner.budget import BURST_S, PAUSE_MS, Budget
from learner.economy import Decoding, Economy, Expected
from learner.windows import WindowMeter
from shared.counters import Counters


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_in_any_span_no_more_than_the_share_is_spent(share: float) -> None:
    clock, step_s = Clock(), 2.0
    budget = Budget(share, clock=clock)
    spent: list[tuple[float, float]] = []  # when each step ended, and all that was spent by then

    def tick(doing: str, wait_ms: int) -> None:
        clock.now += wait_ms / 1000

    breathe = budget.paced(tick)
    while clock.now < 1000.0 + 7200:
        clock.now += step_s
        spent.append((clock.now, budget.spent_s + step_s))
        breathe("training", 0)
    for first in range(0, len(spent), 7):
        for last in range(first + 1, len(spent), 5):
            span = spent[last][0] - spent[first][0]
            assert spent[last][1] - spent[first][1] <= share * (span + BURST_S) + step_s + 1e-6
    # And it is not thrown away either: but for the pauses' grain, all of it is used.
    assert budget.spent_s >= 0.97 * share * 7200


def test_waiting_is_free_and_a_pause_is_said() -> None:
    clock, said = Clock(), list[tuple[str, int]]()
    budget = Budget(0.5, clock=clock)

    def tick(doing: str, wait_ms: int) -> None:
        said.append((doing, wait_ms))
        clock.now += max(wait_ms / 1000, 0.0)

    breathe = budget.paced(tick)
    clock.now += 100
    breathe("waiting for requests", 500)
    assert budget.spent_s == 0
    clock.now += BURST_S  # at half the time allowed, twice what was saved up
    breathe("training", 0)
    assert budget.spent_s == BURST_S
    assert said[2][0].startswith("training; learner.budget_share is spent")
    assert all(0 < wait_ms <= PAUSE_MS for _, wait_ms in said[2:])
    assert budget.owed_s() == 0


def test_earlier_lives_are_reported_and_not_charged() -> None:
    budget = Budget(0.1, spent_s=5000.0, clock=Clock())
    assert (budget.owed_s(), budget.spent_s) == (0, 5000.0)


def test_the_saving_is_tokens_times_the_difference_of_seconds_a_token() -> None:
    economy = Economy()
    economy.window(Decoding(tokens=1000, steps=500, seconds=5.0), Expected(positions=200, live=100, base=50))
    # 10 ms a step; the live drafter needs half a step a token, the base three quarters.
    assert economy.saved_s == pytest.approx(1000 * (0.75 * 0.010 - 0.5 * 0.010))
    economy.window(Decoding(tokens=400, steps=100, seconds=2.0), Expected())
    assert economy.saved_s == pytest.approx(2.5 + 400 * 0.25 * 0.020), "a window without a trace is like the last one"
    report = economy.report(10.0)
    assert (report["training_s"], report["saved_s"], report["balance_s"]) == (10.0, 4.5, -5.5)
    assert Economy.kept(asdict(economy)) == economy


def test_the_base_saves_nothing_and_a_worse_drafter_costs() -> None:
    economy = Economy()
    economy.window(Decoding(1000, 500, 5.0), Expected(200, 50, 50))
    assert economy.saved_s == 0
    economy.window(Decoding(1000, 500, 5.0), Expected(200, 40, 50))
    assert economy.saved_s < 0
    idle = Economy()
    idle.window(Decoding(), Expected())
    assert idle.report(3.0)["balance_s"] == -3.0


def test_a_window_counts_decoding_and_not_waiting() -> None:
    meter, counters = WindowMeter(), Counters()
    meter.cut({("r", "1"): dict(counters.fields)}, 1.0)
    for name, value in (("draft_s", 1.0), ("verify_s", 2.0), ("sample_s", 0.5), ("schedule_s", 9.0)):
        counters.add(name, value)
    counters.add("steps", 10, domain="chat")
    counters.add("emitted", 25, domain="chat")
    assert meter.cut({("r", "1"): counters.fields}, 2.0).decoding == Decoding(25, 10, 3.5)
