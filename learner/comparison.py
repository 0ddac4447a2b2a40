"""Whether a version does worse live than another: alpha by request and domain, and what its drafts cost.

Counts and times in, bounds out. Versions are compared within each domain, so that another mix of traffic is no fall.
It knows nothing of pointers or replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.intervals import Interval, student_quantile
from shared.live_alpha import Served

LEAST_REQUESTS = 8  # of either version, and windows of time
_ROUNDS, _LEVELS, _DRAFT_S, _VERIFY_S = range(4)


@dataclass(frozen=True)
class LiveDifference:
    alpha: Interval  # new minus old, one-sided bounds at the asked confidence
    alpha_new: float  # both weighted alike over the common domains
    alpha_old: float
    per_step_new: float  # accepted drafts of a step, plain steps included, weighted likewise
    per_step_old: float
    requests: int  # of the new version
    tested: float


def compare_alpha(new: Mapping[str, Served], old: Mapping[str, Served], confidence: float) -> LiveDifference | None:
    """None while there is too little of either in the domains that both have served."""
    both = [
        d for d in new if d in old and min(new[d].requests, old[d].requests) >= 2 and new[d].tested and old[d].tested
    ]
    requests = [int(sum(side[d].requests for d in both)) for side in (new, old)]
    if min(requests) < LEAST_REQUESTS:
        return None
    # A domain counts as much as the smaller side allows.
    weights = np.array([1 / (1 / new[d].tested + 1 / old[d].tested) for d in both])
    weights /= weights.sum()
    alphas = [float(weights @ [side[d].alpha for d in both]) for side in (new, old)]
    per_step = [float(weights @ [side[d].accepted_per_step for d in both]) for side in (new, old)]
    variance = float(weights**2 @ [new[d].variance + old[d].variance for d in both])
    margin = student_quantile(confidence, min(requests)) * variance**0.5
    value = alphas[0] - alphas[1]
    return LiveDifference(
        Interval(value, value - margin, value + margin),
        alpha_new=alphas[0],
        alpha_old=alphas[1],
        per_step_new=per_step[0],
        per_step_old=per_step[1],
        requests=requests[0],
        tested=sum(new[d].tested for d in both),
    )


def compare_rounds(
    new: NDArray[np.float64],  # [windows, 4] rounds, levels, seconds of drafting, seconds of verifying
    old: NDArray[np.float64],
    confidence: float,
) -> Interval | None:
    """By how much a round takes longer with the new version's drafts, as a share, at its own mean depth.

    Drafting is measured in forwards of the target in the same rounds: those no version changes, so that a machine that
    is busy with something else slows both and is no difference. None while there is too little.
    """
    if min(len(new), len(old)) < LEAST_REQUESTS:
        return None
    costs, variances = zip(*(_cost_of_level(windows) for windows in (new, old)), strict=True)
    depth = float(new[:, _LEVELS].sum() / new[:, _ROUNDS].sum())
    spread = np.exp(student_quantile(confidence, min(len(new), len(old))) * sum(variances) ** 0.5)
    value, low, high = ((1 + costs[0] * by * depth) / (1 + costs[1] * depth) - 1 for by in (1.0, 1 / spread, spread))
    return Interval(float(value), float(low), float(high))


def _cost_of_level(windows: NDArray[np.float64]) -> tuple[float, float]:
    """Of one more drafted token, in forwards of the target; and the variance of its logarithm, by window."""
    sums = windows.sum(0)
    cost = (sums[_DRAFT_S] / sums[_LEVELS]) / (sums[_VERIFY_S] / sums[_ROUNDS])
    shares = windows / sums
    influence = shares[:, _DRAFT_S] - shares[:, _LEVELS] - shares[:, _VERIFY_S] + shares[:, _ROUNDS]
    return float(cost), float((influence**2).sum() * len(windows) / (len(windows) - 1))
