"""The formulas of acceptance: what a drafter earns on recorded traffic, from two numbers a token.

Committed tokens are drawn from p whatever drafted them, so with a(x) = min(1, q(x)/p(x)) of the committed token x,
E[a(x)] is exactly the sum over v of min(p_v, q_v) (Leviathan et al. 2023, theorem 3.5,
read as an expectation over x ~ p).
Given the committed path, acceptances at its positions are independent, which makes the replay below exact too.
It knows nothing of models: arrays in, counts out. Ratios are formed by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Expected:
    """Expected counts over one committed sequence, had one drafter at one gamma served it."""

    accepted: float
    tested: float
    steps: float


def acceptance_of_committed(
    q: NDArray[np.float64],  # [...] drafter's probability of the committed token, after the request's filters
    p: NDArray[np.float64],  # [...] target's, likewise
) -> NDArray[np.float64]:  # [...] in 0..1
    """min(1, q/p) elementwise: the chance that the draft at this position is the committed token and is accepted."""
    return np.minimum(1.0, np.divide(q, p, out=np.zeros_like(q, dtype=np.float64), where=p > 0))


def replay(
    acceptance: NDArray[np.float64],  # [n, gamma] of depth j of a round that starts at position s
) -> Expected:
    """Expected accepted, tested and steps if rounds of `gamma` drafts had produced these n tokens.

    A round that starts at s commits its accepted drafts and one token more; where it starts next is random, so the
    chance of a start at each position is carried forward. Depths beyond the end of the sequence are not drafted.
    """
    n, gamma = acceptance.shape
    start = np.zeros(n + gamma + 2)
    start[0] = 1.0
    accepted = tested = steps = 0.0
    for s in range(n):
        weight = start[s]
        if weight == 0.0:
            continue
        steps += weight
        reached = weight
        drafts = min(gamma, n - s)
        for j in range(drafts):
            tested += reached
            kept = reached * acceptance[s, j]
            accepted += kept
            start[s + j + 1] += reached - kept
            reached = kept
        start[s + drafts + 1] += reached
    return Expected(accepted, tested, steps)


def of_rounds(
    acceptance: NDArray[np.float64],  # [n, depth] of depth j of a round that starts at position s
    rounds: Iterable[tuple[int, int]],  # (start, drafts) of the rounds that were really served
) -> tuple[float, float]:
    """Expected (accepted, tested) of these very rounds: counts minus expectation average to 0 over requests.

    Where a round starts and how much it drafts depends on what came before, never on its own acceptances; so the sum
    over rounds is a martingale, whatever chose gamma.
    """
    accepted = tested = 0.0
    n = len(acceptance)
    for start, drafts in rounds:
        reached = 1.0
        for j in range(min(drafts, n - start)):
            tested += reached
            reached *= acceptance[start, j]
            accepted += reached
    return float(accepted), float(tested)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a step, (1 - alpha^(gamma+1)) / (1 - alpha), for independent positions (Leviathan et al. 2023, eq. 1)."""
    if alpha >= 1.0:
        return gamma + 1.0
    return float((1.0 - alpha ** (gamma + 1)) / (1.0 - alpha))


def speedup(alpha: float, gamma: int, cost: float) -> float:
    """Against plain decoding, E / (1 + cost*gamma); `cost` is a draft step in target steps (ibid., theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (1.0 + cost * gamma)
