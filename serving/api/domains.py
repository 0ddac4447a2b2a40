"""The domain tags that this replica tells apart. Clients name them, and each becomes counters for good: so, few.

Invariant: `place` answers with at most `most` names of clients, "default" and "other".
"""

from __future__ import annotations

DOMAIN_PATTERN = r"[A-Za-z0-9_.\-]{1,64}"  # it becomes part of counter keys
DEFAULT, OTHER = "default", "other"


class Domains:
    """First come, first counted. Used from one asyncio loop."""

    def __init__(self, most: int) -> None:
        self._most, self._known = most, set[str]()

    def place(self, domain: str) -> str:
        """The tag under which a request of this domain is counted and learnt from."""
        if domain in self._known or domain in (DEFAULT, OTHER):
            return domain
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(domain)
        return domain
