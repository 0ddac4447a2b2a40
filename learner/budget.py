"""How much of the time may go into training: `learner.budget_share` seconds a second, kept by pausing between steps.

Invariant: in any span of t seconds at most share * (t + BURST_S) seconds are spent, one step more at the most. Time is
what passes on the learner's own device while it trains and judges; reading and measuring traces is not counted, since
without that nothing would be known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 60.0  # of allowance that is saved up
PAUSE_MS = 500  # between two looks at whether a pause is over

Breathe = Callable[[str, int], None]  # what is being done, and how many milliseconds there are to spare


class Budget:
    def __init__(self, share: float, *, spent_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`spent_s` is what earlier lives have spent: it is reported on, and not charged again."""
        self._share, self._clock = share, clock
        self.spent_s = spent_s
        self._allowance, self._at = share * BURST_S, clock()

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds
        self._allowance = self._grown() - seconds
        self._at = self._clock()

    def owed_s(self) -> float:
        """How long nothing more may be spent; 0 for now."""
        return max(-self._grown() / self._share, 0.0)

    def paced(self, breathe: Breathe) -> Breathe:
        """A breath that charges what was computed since the one before it, and lasts until more may be spent."""
        since = self._clock()

        def breath(doing: str, wait_ms: int) -> None:
            nonlocal since
            if not wait_ms:  # otherwise it was waiting that took the time
                self.spend(self._clock() - since)
            breathe(doing, wait_ms)
            while (owed := self.owed_s()) > 0:
                pause_ms = max(min(int(owed * 1000), PAUSE_MS), 1)
                breathe(f"{doing}; learner.budget_share is spent, {owed:.0f} s to go", pause_ms)
            since = self._clock()

        return breath

    def _grown(self) -> float:
        earned = self._share * (self._clock() - self._at)
        return min(self._allowance + earned, self._share * BURST_S)
