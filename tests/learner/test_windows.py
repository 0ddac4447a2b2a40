"""Windows are differences of counters: by domain, over restarts and outages, and never a ratio of nothing."""

from __future__ import annotations

import json

import pytest

from learner.windows import WindowMeter
from shared.counters import Counters


def counted(accepted: int, tested: int, emitted: int, domain: str = "chat") -> dict[str, float]:
    counters = Counters()
    for name, value in (("accepted", accepted), ("tested", tested), ("drafted", 2 * tested), ("spec_steps", tested)):
        counters.add(name, value, domain=domain, version="base")
    counters.add("emitted", emitted, domain=domain)
    counters.add("steps", emitted / 2, domain=domain)
    return counters.fields


def test_the_first_look_is_the_zero() -> None:
    meter = WindowMeter()
    assert meter.cut({("r", "1"): counted(5, 10, 100)}, now=10.0).values == {}
    window = meter.cut({("r", "1"): counted(11, 20, 150)}, now=15.0)
    assert window.values["alpha"] == window.values["alpha/chat"] == 0.6
    assert window.values["accepted/chat"] == 6
    assert window.values["gamma"] == 2.0
    assert window.values["tokens_per_second"] == 10.0
    assert window.values["tokens_per_step"] == 2.0
    assert (window.tokens, window.seconds) == (50, 5.0)


def test_replicas_and_domains_add_up() -> None:
    meter = WindowMeter()
    meter.cut({}, now=1.0)
    window = meter.cut({("a", "1"): counted(1, 4, 10), ("b", "1"): counted(3, 4, 30, "sql")}, now=2.0)
    assert window.values["alpha"] == 0.5
    assert (window.values["alpha/chat"], window.values["alpha/sql"]) == (0.25, 0.75)


def test_nothing_served_is_no_window_and_plain_decoding_has_no_alpha() -> None:
    meter = WindowMeter()
    meter.cut({}, now=1.0)
    assert meter.cut({}, now=2.0).values == {}
    window = meter.cut({("a", "1"): counted(0, 0, 10)}, now=3.0)
    assert "alpha" not in window.values
    assert window.values["tokens"] == 10


def test_a_restarted_replica_and_an_empty_redis_are_not_counted_twice() -> None:
    meter = WindowMeter()
    meter.cut({("a", "1"): counted(5, 10, 100)}, now=1.0)
    assert meter.cut({}, now=2.0).tokens == 0
    assert meter.cut({("a", "1"): counted(6, 12, 110)}, now=3.0).tokens == 10
    window = meter.cut({("a", "1"): counted(6, 12, 110), ("a", "2"): counted(1, 2, 7)}, now=4.0)
    assert (window.tokens, window.values["tested"]) == (17, 2)


def test_a_later_life_goes_on_where_this_one_ended() -> None:
    meter = WindowMeter()
    meter.cut({("a", "1"): counted(5, 10, 100)}, now=1.0)
    meter.cut({("a", "1"): counted(6, 12, 110)}, now=2.0)
    later = WindowMeter(json.loads(json.dumps(meter.to_keep())))
    window = later.cut({("a", "1"): counted(9, 15, 130)}, now=1000.0)
    assert (window.tokens, window.values["accepted"]) == (30, 3)
    assert "tokens_per_second" not in window.values, "how long we were away says nothing of the speed"
    again = later.cut({("a", "1"): counted(9, 15, 140)}, now=1005.0)
    assert again.values["tokens_per_second"] == pytest.approx(2.0)
