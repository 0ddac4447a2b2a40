"""The gate's error rates over many simulated attempts, and the reasons that it gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.evaluator import Judged
from learner.gate import Decision, Gate
from shared.config import GateConfig
from shared.intervals import Interval

CONFIG = GateConfig(resamples=400)
ATTEMPTS = 400
Lists = tuple[list[Judged], list[Judged]]


def attempt(rng: np.random.Generator, requests: int, gain: float, shared: float = 0.7) -> Lists:
    """Requests of very different length and difficulty; `shared` of the difficulty is common to both drafters.

    Drafts are as long as they hold: a rejection ends each round, and every token is tested.
    """
    pair: Lists = ([], [])
    for i in range(requests):
        tested = float(rng.integers(20, 200))
        ease, mine, theirs = rng.normal(0, 0.12, 3)
        for judged, own, shift in ((pair[0], mine, gain), (pair[1], theirs, 0.0)):
            alpha = float(np.clip(0.4 + shared * ease + (1 - shared) * own + shift, 0, 1))
            accepted = float(rng.binomial(int(tested), alpha))
            steps = tested - accepted
            judged.append(Judged(f"r{i}", "chat", False, int(tested), accepted, accepted, tested, steps))
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
    for bounded in (decision.gain, decision.speedup):
        assert bounded.low < bounded.value < bounded.high
    assert decision.gain.value == pytest.approx(decision.alpha_candidate - decision.alpha_champion)
    assert decision.speedup.value == pytest.approx(decision.rate_candidate / decision.rate_champion - 1)
    assert f"at least {decision.speedup.low:+.1%} with 95% confidence, 64 requests" in decision.reason
    assert f"({decision.gain.value:+.3f})" in decision.reason
    assert decision == decide(0.1), "the same evidence gives the same decision"


def test_the_least_gain_is_part_of_the_proof() -> None:
    proven = decide(0.1)
    decision = decide(0.1, min_gain=2 * proven.speedup.value)
    assert not decision.promote
    assert f"{2 * proven.speedup.value:+.1%} is not proven" in decision.reason


def test_a_round_costs_what_replicas_measure() -> None:
    """Half of the requests gain what the other half loses; whose rounds are the dearer decides."""
    _, champion = attempt(np.random.default_rng(0), 64, 0.0)
    better = [replace(j, steps=j.steps * (0.8 if i % 2 else 1.25)) for i, j in enumerate(champion)]
    dear_where_better = [0.05 if i % 2 else 0.01 for i in range(64)]
    dear_where_worse = [0.01 if i % 2 else 0.05 for i in range(64)]
    gate = Gate(CONFIG)
    assert gate.decide(better, champion, round_s=dear_where_better).promote
    assert gate.decide(better, champion, round_s=dear_where_worse).speedup.high < 0
    assert "tokens/s" in gate.decide(better, champion, round_s=dear_where_better).reason
    assert "tokens a round" in gate.decide(better, champion).reason


def test_more_alpha_that_saves_no_round_is_no_reason() -> None:
    """Alpha is a share of what was tested; only rounds that are not needed any more make tokens sooner."""
    _, champion = attempt(np.random.default_rng(0), 64, 0.0)
    candidate = [replace(j, tested=0.9 * j.tested) for j in champion]
    decision = Gate(CONFIG).decide(candidate, champion)
    assert decision.gain.low > 0
    assert not decision.promote


def test_too_few_requests_prove_nothing() -> None:
    pair = attempt(np.random.default_rng(0), 15, 0.3)
    decision = Gate(CONFIG).decide(*pair)
    assert not decision.promote
    assert "15 requests" in decision.reason
    assert Gate(CONFIG).decide([], []).requests == 0


def test_a_copy_of_the_champion_is_not_promoted() -> None:
    _, champion = attempt(np.random.default_rng(0), 64, 0.0)
    decision = Gate(CONFIG).decide(champion, champion)
    assert not decision.promote
    assert decision.gain == decision.speedup == Interval(0.0, 0.0, 0.0)


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
