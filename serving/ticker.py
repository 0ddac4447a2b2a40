"""A daemon thread that does one thing again and again until it is stopped.

What may go wrong inside is for the caller to catch: an exception ends the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ticker:
    def __init__(self, name: str, do: Callable[[], None], *, every_s: float, at_once: bool = False) -> None:
        """`at_once`: the first time when it starts, and not only after a first pause."""
        self._do, self._every_s, self._at_once = do, every_s, at_once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait_s: float = 5.0) -> None:
        """Waits at most so long for what is being done."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        if self._at_once:
            self._do()
        while not self._stop.wait(self._every_s):
            self._do()
