"""A fall of alpha is noticed soon, noise is not, and a recovery clears the alarm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from learner.drift import DriftDetector

TESTED = 40  # of one request


def stream(rng: np.random.Generator, alpha: float, requests: int) -> Iterator[tuple[float, float]]:
    """Requests that differ in difficulty, so that counts vary more than a binomial's."""
    for _ in range(requests):
        yield float(rng.binomial(TESTED, np.clip(rng.normal(alpha, 0.1), 0, 1))), float(TESTED)


def feed(detector: DriftDetector, domain: str, counts: Iterator[tuple[float, float]]) -> int | None:
    """Requests until the first alarm; None without one."""
    for number, (accepted, tested) in enumerate(counts, start=1):
        detector.update(domain, accepted, tested)
        if detector.drifted(domain):
            return number
    return None


def test_steady_traffic_raises_no_alarm() -> None:
    alarms = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        alarms += feed(DriftDetector(), "chat", stream(rng, 0.5, 2000)) is not None
    assert alarms == 0


@pytest.mark.parametrize(("fall", "within"), [(0.3, 20), (0.15, 60)])
def test_a_fall_is_noticed_within_the_stated_positions(fall: float, within: int) -> None:
    """threshold / (fall - slack) positions of 40 each are 10 and 25 requests; noise may double that."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        detector = DriftDetector()
        assert feed(detector, "chat", stream(rng, 0.5, 200)) is None
        noticed = feed(detector, "chat", stream(rng, 0.5 - fall, 200))
        assert noticed is not None
        assert noticed <= within
        short, long = detector.averages("chat")
        assert short < long


def test_traffic_that_moves_to_a_harder_domain_is_a_drift() -> None:
    rng = np.random.default_rng(0)
    detector = DriftDetector()
    assert feed(detector, "chat", stream(rng, 0.5, 100)) is None
    assert feed(detector, "sql", stream(rng, 0.2, 100)) is not None
    assert not detector.drifted("chat")


def test_recovery_and_acceptance_clear_the_alarm() -> None:
    rng = np.random.default_rng(0)
    for accept in (False, True):
        detector = DriftDetector()
        feed(detector, "chat", stream(rng, 0.5, 100))
        for accepted, tested in stream(rng, 0.2, 100):
            detector.update("chat", accepted, tested)
        assert detector.drifted("chat")
        if accept:
            detector.accept("chat")
            assert feed(detector, "chat", stream(rng, 0.2, 200)) is None
        else:
            for accepted, tested in stream(rng, 0.5, 100):
                detector.update("chat", accepted, tested)
        assert not detector.drifted("chat")


def test_windows_of_any_size_say_the_same() -> None:
    rng = np.random.default_rng(0)
    counts = [*stream(rng, 0.5, 100), *stream(rng, 0.3, 10)]
    fine, coarse = DriftDetector(), DriftDetector()
    for accepted, tested in counts:
        fine.update("chat", accepted, tested)
    for i in range(0, len(counts), 5):
        window = counts[i : i + 5]
        coarse.update("chat", sum(a for a, _ in window), sum(t for _, t in window))
    assert coarse.score("chat") == pytest.approx(fine.score("chat"), rel=0.1)


def test_an_empty_window_and_an_unknown_domain_score_nothing() -> None:
    detector = DriftDetector()
    assert detector.update("chat", 0, 0) == 0.0
    assert detector.score("nobody") == 0.0
    assert detector.averages("nobody") == (0.0, 0.0)
