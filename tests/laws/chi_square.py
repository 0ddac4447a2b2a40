"""Pearson's test of counts against exact probabilities, and how often it may cry wolf.

All draws in these tests follow from fixed seeds, so a test that passes goes on passing until code changes. `ALARM` is
the chance, per test, that a correct program fails at the moment its draws change; it was fixed before any was run.
`CAUGHT` is what a deliberately broken program must fall below, to show that the same test would have seen it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

ALARM = 1e-4
CAUGHT = 1e-12
_LEAST_EXPECTED = 5.0  # below it the statistic is not chi-square distributed (Cochran's rule)


def p_value(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Of flat `counts` against flat `probabilities`, which sum to 1. Cells of probability 0 must be empty.

    Cells are merged, in order of their probability, until each holds five expected counts; merging depends on the
    probabilities alone.
    """
    assert counts.shape == probabilities.shape
    assert abs(probabilities.sum() - 1) < 1e-6, f"the exact probabilities sum to {probabilities.sum()}"
    impossible = probabilities <= 0
    if counts[impossible].any():
        return 0.0
    order = np.argsort(-probabilities[~impossible], kind="stable")
    expected = probabilities[~impossible][order] * counts.sum()
    observed = counts[~impossible][order]
    # Expected counts descend: the tail is cut where what has gathered since the last cut reaches the minimum.
    cuts, gathered = [0], 0.0
    for index, value in enumerate(expected):
        gathered += value
        if gathered >= _LEAST_EXPECTED:
            cuts.append(index + 1)
            gathered = 0.0
    cuts[-1] = len(expected)
    assert len(cuts) > 2, "too few counts for a test"
    expected_bins = np.add.reduceat(expected, cuts[:-1])
    observed_bins = np.add.reduceat(observed, cuts[:-1])
    statistic = ((observed_bins - expected_bins) ** 2 / expected_bins).sum()
    return float(stats.chi2.sf(statistic, len(expected_bins) - 1))
