"""A ticker does its one thing until it is stopped, and begins when it was told to."""

from __future__ import annotations

import threading

import pytest

from serving.ticker import Ticker

LONG_S = 600.0  # no second time within a test


@pytest.mark.parametrize("at_once", [True, False])
def test_the_first_time_is_at_once_or_after_a_pause(at_once: bool) -> None:
    done = threading.Event()
    ticker = Ticker("test", done.set, every_s=LONG_S, at_once=at_once)
    ticker.start()
    assert done.wait(5.0 if at_once else 0.05) == at_once
    ticker.stop()


def test_it_goes_on_until_it_is_stopped() -> None:
    times: list[int] = []
    thrice = threading.Event()

    def do() -> None:
        times.append(1)
        if len(times) >= 3:
            thrice.set()

    ticker = Ticker("test", do, every_s=0.001)
    ticker.start()
    assert thrice.wait(5.0)
    ticker.stop()
    assert not ticker._thread.is_alive()


def test_one_that_never_started_may_be_stopped() -> None:
    Ticker("test", lambda: None, every_s=LONG_S).stop()
