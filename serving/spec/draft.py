"""A draft: what a drafter proposes for one request in one round, and the distributions that drew it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Proposed tokens as a tree in which `parents[i]` is the draft before i, -1 the last committed token.

    `probs[i]` is the very distribution that drew token i (law 2), over the target's vocabulary; None says that every
    token is a point mass, as greedy drafts are.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Tensor | None  # [drafts, vocab] float32
    version: str
    chance: float | None = None  # that all of it holds, as the drafter sees it; None: it was not asked

    @classmethod
    def chain(cls, token_ids: list[int], probs: Tensor | None, version: str, chance: float | None = None) -> Draft:
        """A tree with one branch."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), probs, version, chance)

    @property
    def gamma(self) -> int:
        return len(self.token_ids)
