"""Windows add up to the whole whatever restarts or is away meanwhile."""

from __future__ import annotations

import pytest

from ops.demo_windows import DomainCounts, Meter, counts_of, tokens_at
from tests.ops.demo_fakes import synthetic_run


def _counters(steps: float, domain: str = "sql") -> dict[str, float]:
    names = {"steps": 1, "emitted": 2, "tested": 3, "accepted": 1.5, "drafted": 4}
    return {f"{name}|domain={domain}": factor * steps for name, factor in names.items()}


def test_a_window_is_what_came_since_the_last_and_the_first_look_is_zero() -> None:
    meter = Meter({("r", "1"): _counters(100)}, 0)
    meter.look({("r", "1"): _counters(110)})
    first = meter.cut(5, "v1")
    meter.look({("r", "1"): {**_counters(110), **_counters(7, "german")}})
    second = meter.cut(10, "v2")
    assert first.domains == {"sql": DomainCounts(15, 30, 40, 10, 20)}
    assert list(second.domains) == ["german"]  # sql had no traffic
    assert (first.tokens, second.tokens) == (20, 34)
    assert (first.start, first.end, second.start, second.version) == (0, 5, 5, "v2")
    assert counts_of(meter.since_start, None).steps == 17


def test_a_restarted_replica_counts_in_a_new_epoch() -> None:
    meter = Meter({("r", "1"): _counters(100)}, 0)
    meter.look({("r", "1"): _counters(100), ("r", "2"): _counters(5)})
    assert meter.cut(5, "").domains["sql"].steps == 5


def test_counters_that_vanish_for_a_while_are_neither_lost_nor_counted_twice() -> None:
    meter = Meter({("r", "1"): _counters(10)}, 0)
    meter.look({})
    assert meter.cut(5, "").domains == {}
    meter.look({("r", "1"): _counters(30)})
    assert meter.cut(10, "").domains["sql"].steps == 20


def test_tokens_between_looks_are_in_proportion() -> None:
    run = synthetic_run(seconds=20)  # 100 tokens a second, looks every 5 s
    start = run.started_at
    assert tokens_at(run.board.windows, [start, start + 2.5, start + 12, start + 99]) == pytest.approx(
        [0, 250, 1200, 2000]
    )
    assert tokens_at([], [start]) == [0.0]
