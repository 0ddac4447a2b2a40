"""The formulas of acceptance against enumeration by hand and against the process that they describe."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from shared.acceptance import Expected, acceptance_of_committed, expected_tokens, replay, speedup

SIGMAS = 4.5  # of a Monte-Carlo mean: seven false alarms in a million


def enumerate_rounds(acceptance: np.ndarray, start: int = 0, weight: float = 1.0) -> Expected:
    """Every way to cut the sequence into rounds, one after the other, each with its probability."""
    n, gamma = acceptance.shape
    if start >= n:
        return Expected(0.0, 0.0, 0.0)
    drafts = min(gamma, n - start)
    accepted = tested = 0.0
    steps = weight
    for kept in range(drafts + 1):
        chance = weight * float(np.prod(acceptance[start, :kept]))
        if kept < drafts:
            chance *= 1 - acceptance[start, kept]
        accepted += chance * kept
        tested += chance * min(kept + 1, drafts)
        rest = enumerate_rounds(acceptance, start + kept + 1, chance)
        accepted, tested, steps = accepted + rest.accepted, tested + rest.tested, steps + rest.steps
    return Expected(accepted, tested, steps)


@pytest.mark.parametrize(("n", "gamma"), [(1, 1), (1, 3), (2, 2), (5, 1), (6, 2), (7, 3), (8, 4)])
def test_replay_equals_enumeration(n: int, gamma: int) -> None:
    acceptance = np.random.default_rng(n * 10 + gamma).random((n, gamma))
    acceptance[0, 0], acceptance[-1, -1] = 1.0, 0.0  # certain and impossible ones among them
    found, wanted = replay(acceptance), enumerate_rounds(acceptance)
    assert found.accepted == pytest.approx(wanted.accepted)
    assert found.tested == pytest.approx(wanted.tested)
    assert found.steps == pytest.approx(wanted.steps)


def test_replay_of_simple_cases() -> None:
    assert replay(np.ones((6, 2))) == Expected(accepted=4.0, tested=4.0, steps=2.0)
    assert replay(np.zeros((6, 2))) == Expected(accepted=0.0, tested=6.0, steps=6.0)
    assert replay(np.ones((4, 0))) == Expected(accepted=0.0, tested=0.0, steps=4.0)
    assert replay(np.ones((3, 8))) == Expected(accepted=3.0, tested=3.0, steps=1.0)


def test_replay_at_one_alpha_is_the_closed_form_in_the_long_run() -> None:
    alpha, gamma, n = 0.6, 3, 4000
    found = replay(np.full((n, gamma), alpha))
    assert n / found.steps == pytest.approx(expected_tokens(alpha, gamma), rel=1e-3)
    assert found.accepted / found.tested == pytest.approx(alpha)


# --- against the live process ----------------------------------------------------------------------------------


class World:
    """Random p and q over four tokens; q also depends on how deep in its round a draft stands, as a head's does."""

    def __init__(self, seed: int, tokens: int, gamma: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens, self.gamma = tokens, gamma
        self.p = rng.dirichlet(np.ones(4), size=(tokens, 4))  # by position and token before
        self.q = rng.dirichlet(np.ones(4), size=(tokens, 4, gamma))

    def live(self, rng: random.Random) -> tuple[list[int], int, int, int]:
        """Rejection sampling as it is served: the committed tokens, and accepted, tested and steps."""
        path: list[int] = []
        accepted = tested = steps = 0
        while len(path) < self.tokens:
            steps += 1
            for depth in range(min(self.gamma, self.tokens - len(path)) + 1):
                place, before = len(path), path[-1] if path else 0
                if place == self.tokens:
                    break
                p = self.p[place, before]
                if depth == self.gamma:
                    path.append(self.draw(p, rng))
                    break
                q = self.q[place, before, depth]
                token = self.draw(q, rng)
                tested += 1
                if rng.random() * q[token] < p[token]:
                    accepted += 1
                    path.append(token)
                    continue
                path.append(self.draw(np.maximum(p - q, 0), rng))
                break
        return path, accepted, tested, steps

    def judged(self, path: list[int]) -> Expected:
        """The same counts, expected from a path that anybody may have drafted, by two numbers a token."""
        acceptance = np.zeros((self.tokens, self.gamma))
        for start, depth in product(range(self.tokens), range(self.gamma)):
            place = start + depth
            if place < self.tokens:
                before = path[place - 1] if place else 0
                q = np.array([self.q[place, before, depth, path[place]]])
                p = np.array([self.p[place, before, path[place]]])
                acceptance[start, depth] = acceptance_of_committed(q, p)[0]
        return replay(acceptance)

    def plain(self, rng: random.Random) -> list[int]:
        path: list[int] = []
        for place in range(self.tokens):
            path.append(self.draw(self.p[place, path[-1] if path else 0], rng))
        return path

    @staticmethod
    def draw(weights: np.ndarray, rng: random.Random) -> int:
        return rng.choices(range(4), weights)[0]


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("source", ["plain", "live"])
def test_judging_recorded_traffic_foretells_live_counts(gamma: int, source: str) -> None:
    """Traffic that was decoded plainly, or drafted by the very drafter, tells the same about it."""
    world, rng = World(gamma, 6, gamma), random.Random(gamma)
    trials = 6000
    live = np.array([world.live(rng)[1:] for _ in range(trials)], dtype=float)
    paths = (world.plain(rng) if source == "plain" else world.live(rng)[0] for _ in range(trials))
    judged = np.array([[e.accepted, e.tested, e.steps] for e in map(world.judged, paths)])
    for column in range(3):
        difference = live[:, column].mean() - judged[:, column].mean()
        error = np.sqrt((live[:, column].var() + judged[:, column].var()) / trials)
        assert abs(difference) < SIGMAS * error


def test_the_mean_over_committed_tokens_is_the_overlap() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(9)), rng.dirichlet(np.ones(9))
    expected = sum(p * acceptance_of_committed(q, p))  # x drawn from p
    assert expected == pytest.approx(np.minimum(p, q).sum())


def test_acceptance_stays_in_its_range() -> None:
    q, p = np.array([0.0, 0.2, 0.9, 0.5]), np.array([0.5, 0.4, 0.3, 0.0])
    assert acceptance_of_committed(q, p).tolist() == [0.0, 0.5, 1.0, 0.0]


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_expected_tokens_and_speedup(gamma: int) -> None:
    for alpha in (0.0, 0.3, 0.9, 1.0):
        sums = sum(alpha**i for i in range(gamma + 1))
        assert expected_tokens(alpha, gamma) == pytest.approx(sums)
        assert speedup(alpha, gamma, 0.1) == pytest.approx(sums / (1 + 0.1 * gamma))
