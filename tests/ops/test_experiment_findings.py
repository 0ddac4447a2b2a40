"""When an online drafter has recovered, what it has forgotten, and that noise alone is neither."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.experiment_findings import WITHIN, Draws, memory, recovery

N, TOKENS = 100, 10.0  # requests and tokens of each; the window is a fifth of the requests
POSITIONS = np.full(N, TOKENS)
ONCE = np.ones((1, N))  # one draw that is the sample itself


def acceptances(alpha: float, behind: int, by: float) -> NDArray[np.float64]:
    """alpha everywhere, but `by` less in the first requests."""
    return (alpha - by * (np.arange(N) < behind)) * POSITIONS


def test_recovery_is_the_middle_of_the_first_window_that_is_within_reach() -> None:
    found = recovery(acceptances(0.5, 40, 0.3), acceptances(0.5, 0, 0.0), POSITIONS, POSITIONS, ONCE)
    # Two of its 20 requests may be from before the 40th: 2 * 0.3 / 20 is 0.03. It begins at the 38th.
    assert found.window == 20
    assert found.tokens == (38 + 10) * TOKENS
    assert (found.low, found.high) == (found.tokens, found.tokens)


def test_whoever_is_never_behind_needs_no_token_and_whoever_stays_behind_never_recovers() -> None:
    reference = acceptances(0.5, 0, 0.0)
    assert recovery(acceptances(0.5 - WITHIN + 1e-9, 0, 0.0), reference, POSITIONS, POSITIONS, ONCE).tokens == 0.0
    never = recovery(acceptances(0.5 - WITHIN - 1e-3, 0, 0.0), reference, POSITIONS, POSITIONS, ONCE)
    assert (never.tokens, never.low, never.high) == (None, None, None)


def test_the_interval_of_a_recovery_holds_the_truth_and_has_a_width_where_requests_differ() -> None:
    rng = np.random.default_rng(0)
    online, reference = (rng.binomial(10, np.where(np.arange(N) < b, 0.2, 0.5)).astype(float) for b in (40, 0))
    found = recovery(online, reference, POSITIONS, POSITIONS, Draws([N], 0).by_domain[0])
    assert found.low is not None
    assert found.low < 480 < (found.high or np.inf)  # as in the first test
    assert found.high is None or found.high > found.low


def test_windows_shrink_with_the_domain_down_to_all_of_it() -> None:
    few = np.full(5, 4.0)
    assert recovery(few / 2, few / 2, few, few, np.ones((1, 5))).window == 5


def test_an_interval_by_request_covers_about_as_often_as_it_says() -> None:
    rng, hits, trials = np.random.default_rng(1), 0, 100
    for trial in range(trials):
        alpha = rng.beta(4, 4, 60)  # requests differ, so that positions are not independent
        over = rng.binomial(20, alpha).astype(float)
        found = Draws([60], trial).ratio([over], [np.full(60, 20.0)], [0])
        hits += found.low <= 0.5 <= found.high
    # 95 % of 100 with a standard deviation of 2; a percentile interval of 60 requests is a little narrow.
    assert 0.95 * trials - 4 * 2.2 <= hits <= trials


def versions(alphas: dict[str, float], records: int, seed: int) -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return {
        name: np.stack([rng.binomial(50, alpha, records), np.full(records, 50)], axis=1).astype(float)
        for name, alpha in alphas.items()
    }


def test_what_was_lost_is_measured_against_the_best_version() -> None:
    found = memory(versions({"base": 0.2, "v1": 0.5, "v2": 0.4}, 200, seed=0), "v2", seed=0)
    # 10,000 positions: a standard deviation of 0.005 each, 0.007 of the difference.
    assert found.lost.value == pytest.approx(0.1, abs=0.03)
    assert found.lost.low < 0.1 < found.lost.high
    assert found.peak - found.end == pytest.approx(found.lost.value)


def test_a_best_version_that_is_the_last_one_has_lost_nothing() -> None:
    found = memory(versions({"base": 0.2, "v1": 0.5}, 40, seed=0), "v1", seed=0)
    assert (found.lost.value, found.lost.low, found.lost.high) == (0.0, 0.0, 0.0)


def test_the_luckiest_of_many_equal_versions_is_no_peak() -> None:
    losses, naive = [], []
    for seed in range(40):
        equal = versions(dict.fromkeys([f"v{i}" for i in range(20)], 0.4), 16, seed)
        losses.append(memory(equal, "v0", seed).lost.value)
        alphas = {name: rows[:, 0].sum() / rows[:, 1].sum() for name, rows in equal.items()}
        naive.append(max(alphas.values()) - alphas["v0"])
    # 800 positions a version: a standard deviation of 0.017, and the largest of 20 is almost two of them up.
    assert np.mean(naive) > 0.02
    assert abs(np.mean(losses)) < 0.01
