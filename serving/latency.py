"""How long a client waits: for the first token, and between tokens. Measured where events leave the engine's thread.

The tokens of one step arrive together and share the time since the step before, so that the sum over all tokens is the
time of decoding. Used from one asyncio loop; whoever publishes reads `counters`.
"""

from __future__ import annotations

import time

from shared.counters import Counters
from shared.histogram import Histogram
from shared.metrics import FIRST_TOKEN_BOUNDS, TOKEN_BOUNDS


class Latency:
    """Of all requests of a replica."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._first = Histogram("first_token", FIRST_TOKEN_BOUNDS, self.counters)
        self._next = Histogram("token", TOKEN_BOUNDS, self.counters)

    def begin(self) -> Stopwatch:
        """A request is admitted now."""
        return Stopwatch(self._first, self._next)


class Stopwatch:
    """Of one request."""

    def __init__(self, first: Histogram, between: Histogram) -> None:
        self._first, self._next = first, between
        self._at, self._begun = time.perf_counter(), False

    def tokens(self, count: int) -> None:
        """So many have just come."""
        now = time.perf_counter()
        if self._begun:
            self._next.observe((now - self._at) / count, count)
        else:
            self._first.observe(now - self._at)
        self._at, self._begun = now, True
