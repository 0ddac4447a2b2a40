"""When a chain of drafts ends early: where the drafter's own doubt says that one more costs more than it earns.

A drafter names, behind each token it drew, the product of the largest probabilities of the distributions so far: the
chance that all of its drafts hold, as it sees it. That is a function of the contexts, never of what the last draw came
to (law 2), and it only decides whether another token is drawn. How often drafts of such a chance did hold is counted,
so that a drafter which is too sure of itself, or too modest, is read rightly.
"""

from __future__ import annotations

from serving.spec.rates import Rate

_BUCKETS = 16
_DECAY = 0.995
_STRENGTH = 8.0  # observations that the drafter's own word weighs


class ConfidenceCut:
    """From a needed chance to the least one, as the drafter names it, behind which drafting goes on."""

    def __init__(self) -> None:
        self._held = [Rate(_DECAY) for _ in range(_BUCKETS)]

    def observe(self, chance: float, held: bool) -> None:
        """A draft ended with this chance, and all of it was accepted, or not."""
        self._held[min(int(chance * _BUCKETS), _BUCKETS - 1)].add(float(held), 1.0)

    def least(self, needed: float) -> float:
        """0 when even the most doubtful drafts hold often enough, 1 when none do."""
        for index, rate in enumerate(self._held):
            if rate.alpha((index + 0.5) / _BUCKETS, _STRENGTH) >= needed:
                return index / _BUCKETS
        return 1.0
