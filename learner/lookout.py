"""Watches alpha by domain over the measured requests: which domains have drifted, which new ones lag behind.

Fed with every request once, in order of arrival, and rebuilt from the ledger after a restart. Measured alpha on all
committed positions is used, because a domain that is decoded plainly has no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from learner.drift import DriftDetector, DriftSettings

HISTORY = 4000  # requests that a restart looks back on
NEW_TOKENS = 8000.0  # positions after which a domain is no longer new
LEAST_TOKENS = 500.0  # before anything is said of a new domain
LAG = 0.05  # below the average of the others


@dataclass
class _Seen:
    accepted: float = 0.0
    positions: float = 0.0


class Lookout:
    def __init__(self, settings: DriftSettings | None = None) -> None:
        self._detector = DriftDetector(settings)
        self._seen: dict[str, _Seen] = {}

    @classmethod
    def rebuild(
        cls,
        history: Iterable[tuple[int, str, float, int]],  # order, domain, accepted, positions
        settled: Mapping[str, int],  # order at which a domain's alpha was last taken for normal
        settings: DriftSettings | None = None,
    ) -> Lookout:
        found, due = cls(settings), dict(settled)
        for order, domain, accepted, positions in history:
            for name in [name for name, at in due.items() if order > at]:
                found.settle(name)
                del due[name]
            found.update(domain, accepted, positions)
        for name in due:
            found.settle(name)
        return found

    def update(self, domain: str, accepted: float, positions: int) -> None:
        seen = self._seen.setdefault(domain, _Seen())
        seen.accepted += accepted
        seen.positions += positions
        self._detector.update(domain, accepted, positions)

    def settle(self, domain: str) -> None:
        """What is now is the normal: the next drift is one from here."""
        self._detector.accept(domain)

    def drifted(self) -> tuple[str, ...]:
        return tuple(domain for domain in self._seen if self._detector.drifted(domain))

    def lagging(self) -> tuple[str, ...]:
        """Domains with little traffic so far whose alpha is clearly below that of the established ones."""
        old = [seen for seen in self._seen.values() if seen.positions >= NEW_TOKENS]
        if not old:
            return ()
        average = sum(seen.accepted for seen in old) / sum(seen.positions for seen in old)
        return tuple(
            domain
            for domain, seen in self._seen.items()
            if LEAST_TOKENS <= seen.positions < NEW_TOKENS and seen.accepted / seen.positions < average - LAG
        )

    def scores(self) -> dict[str, float]:
        """Drift score by domain; 1 and above is a drift."""
        return {domain: self._detector.score(domain) for domain in self._seen}
