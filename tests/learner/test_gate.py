"""The gate's error rates over many simulated attempts, and the reasons that it gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.evaluator import Judged
from learner.gate import Decision, Gate
from shared.config import GateConfig

CONFIG = GateConfig(resamples=400)
ATTEMPTS = 400
Lists = tuple[list[Judged], list[Judged]]


def attempt(rng: np.random.Generator, requests: int, gain: float, shared: float = 0.7) -> Lists:
    """Requests of very different length and difficulty; `shared` of the difficulty is common to both drafters."""
    pair: Lists = ([], [])
    for i in range(requests):
        tested = float(rng.integers(20, 200))
        ease, mine, theirs = rng.normal(0, 0.12, 3)
        for judged, own, shift in ((pair[0], mine, gain), (pair[1], theirs, 0.0)):
            alpha = float(np.clip(0.4 + shared * ease + (1 - shared) * own + shift, 0, 1))
            accepted = float(rng.binomial(int(tested), alpha))
            judged.append(Judged(f"r{i}", "chat", False, int(tested), accepted, accepted, tested, tested / 2))
    return pair


def promoted(requests: int, gain: float) -> float:
    rng = np.random.default_rng(requests)
    return sum(Gate(CONFIG, i).decide(*attempt(rng, requests, gain)).promote for i in range(ATTEMPTS)) / ATTEMPTS


@pytest.mark.parametrize("requests", [16, 60])
def test_an_equal_candidate_passes_at_most_at_the_nominal_rate(requests: int) -> None:
    # 5 % and three standard errors of a share over 400 attempts
    assert promoted(requests, 0.0) <= 0.05 + 3 * (0.05 * 0.95 / ATTEMPTS) ** 0.5


def test_a_candidate_trained_on_shuffled_labels_passes_never() -> None:
    assert promoted(60, -0.05) == 0


def test_five_hundredths_more_are_seen_on_a_hundred_requests() -> None:
    assert promoted(100, 0.05) >= 0.95


def decide(gain: float, **changes: float) -> Decision:
    pair = attempt(np.random.default_rng(0), 64, gain)
    return Gate(replace(CONFIG, **changes)).decide(*pair)  # type: ignore[arg-type]


def test_the_reason_carries_the_numbers() -> None:
    decision = decide(0.1)
    assert decision.promote
    assert decision.ci_low < decision.gain < decision.ci_high
    assert decision.gain == pytest.approx(decision.alpha_candidate - decision.alpha_champion)
    assert f"{decision.ci_low:+.3f} with 95% confidence, 64 requests" in decision.reason
    assert decision == decide(0.1), "the same evidence gives the same decision"


def test_the_least_gain_is_part_of_the_proof() -> None:
    decision = decide(0.1, min_gain=0.2)
    assert not decision.promote
    assert "+0.200 is not proven" in decision.reason


def test_too_few_requests_prove_nothing() -> None:
    pair = attempt(np.random.default_rng(0), 15, 0.3)
    decision = Gate(CONFIG).decide(*pair)
    assert not decision.promote
    assert "15 requests" in decision.reason
    assert Gate(CONFIG).decide([], []).requests == 0


def test_a_copy_of_the_champion_is_not_promoted() -> None:
    _, champion = attempt(np.random.default_rng(0), 64, 0.0)
    decision = Gate(CONFIG).decide(champion, champion)
    assert (decision.promote, decision.gain, decision.ci_low) == (False, 0.0, 0.0)


def test_seeded_requests_and_empty_ones_are_left_out() -> None:
    candidate, champion = attempt(np.random.default_rng(0), 40, 0.3)
    for judged in (candidate, champion):
        judged[:10] = [replace(j, seeded=True) for j in judged[:10]]
        judged[10:15] = [replace(j, positions=0, accepted=0.0, tested=0.0) for j in judged[10:15]]
    assert Gate(CONFIG).decide(candidate, champion).requests == 25


def test_a_probe_that_loses_too_much_stops_the_promotion() -> None:
    pair = attempt(np.random.default_rng(0), 64, 0.1)
    kept, lost = (attempt(np.random.default_rng(1), 64, loss) for loss in (-0.01, -0.15))
    assert Gate(CONFIG).decide(*pair, probes={"maths": kept}).promote
    decision = Gate(CONFIG).decide(*pair, probes={"maths": kept, "code": lost})
    assert not decision.promote
    assert "the probe code loses" in decision.reason
    assert decision.probes["code"] < -CONFIG.probe_loss < decision.probes["maths"]
