"""Whether learning pays: seconds spent on training against seconds of decoding that better drafts have saved.

In a window with T emitted tokens, decoding took c = (draft + verify + sample seconds) / steps a step. On the requests
that were measured, a drafter that accepts A of P positions needs P - A steps, so a token takes (1 - A/P) * c seconds:
    saved = T * (1/tok_s of the base - 1/tok_s of the live drafter) = T * c * (A_live - A_base) / P
Both are judged on the same requests at the same gamma. It is an estimate: gamma auto would have drafted less with a
worse drafter, and requests that leave no trace are taken for like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoding:
    """What replicas counted in one window; seconds are of engine steps, which a batch shares."""

    tokens: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Expected:
    """Of requests measured in one window: positions, and how many of them each drafter's drafts would have made."""

    positions: float = 0.0
    live: float = 0.0
    base: float = 0.0


@dataclass
class Economy:
    saved_s: float = 0.0
    tokens: float = 0.0  # that this speaks of
    steps_saved: float = 0.0  # by a token, as last measured
    step_s: float = 0.0  # of decoding, as last counted

    @classmethod
    def kept(cls, state: Mapping[str, Any]) -> Economy:
        return cls(**state)

    def window(self, decoding: Decoding, expected: Expected) -> None:
        if expected.positions:
            self.steps_saved = (expected.live - expected.base) / expected.positions
        if decoding.steps:
            self.step_s = decoding.seconds / decoding.steps
            self.tokens += decoding.tokens
            self.saved_s += decoding.tokens * self.steps_saved * self.step_s

    def report(self, spent_s: float) -> dict[str, float]:
        """For people: negative `balance_s` means that training has not paid for itself yet."""
        return {
            "training_s": round(spent_s, 3),
            "saved_s": round(self.saved_s, 3),
            "balance_s": round(self.saved_s - spent_s, 3),
            "tokens": self.tokens,
            "steps_saved_per_token": round(self.steps_saved, 4),
            "step_s": round(self.step_s, 6),
        }
