"""What served rounds should have counted: exact given their starts, whatever chose how much they drafted."""

from __future__ import annotations

import numpy as np
import pytest

from shared.acceptance import of_rounds


def test_one_round_by_hand() -> None:
    acceptance = np.array([[0.5, 0.25], [0.8, 0.4], [1.0, 0.1]])
    # From 0: tested 1 + 0.5, accepted 0.5 + 0.125. From 2 only one position is left of the two that were drafted.
    assert of_rounds(acceptance, [(0, 2), (2, 2)]) == pytest.approx((0.625 + 1.0, 1.5 + 1.0))
    assert of_rounds(acceptance, []) == (0.0, 0.0)


def test_counts_agree_even_when_gamma_follows_what_was_accepted() -> None:
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(4000):
        acceptance = rng.random((12, 3)) ** 2
        rounds, counted, start, gamma = [], np.zeros(2), 0, 2
        while start < 12:
            drafts = min(gamma, 12 - start)
            kept = 0
            while kept < drafts and rng.random() < acceptance[start, kept]:
                kept += 1
            rounds.append((start, drafts))
            counted += (kept, min(kept + 1, drafts))
            start += kept + 1
            gamma = 3 if kept == drafts else int(rng.integers(1, 3)) if kept else 1  # as a controller would
        differences.append(counted - of_rounds(acceptance, rounds))
    mean, error = np.mean(differences, 0), np.std(differences, 0) / np.sqrt(len(differences))
    assert (abs(mean) < 4 * error).all()  # a false alarm once in 8,000 seeds
