"""How often drafts are accepted: of a request, of its domain, of all requests, each falling back on the next.

Decayed counts, so that all of them follow drift. An estimate is its own counts and `strength` more of the one it falls
back on (a Beta prior's mean); the last one falls back on one half: the benefit of the doubt for a new drafter.
"""

from __future__ import annotations

import math

_PRIOR = 0.5
_ALL, _DOMAIN, _REQUEST = 0.995, 0.99, 0.97  # decay a round: memories of 200, 100 and 33 rounds
_STRENGTH = 4.0  # tested positions that a prior weighs
_REQUEST_STRENGTH = 24.0  # as requests of a domain differ by about 0.1
_DOUBT = 0.7  # standard deviations that a request gets for the benefit of the doubt
_FADE, _FADED = 0.998, 8.0  # of a domain's counts for a round without a draft, and what is left of them at least
_MOST_DOMAINS = 256  # tags come from clients: the longest unused is forgotten


class Rate:
    """Decayed counts of accepted and tested drafts."""

    __slots__ = ("_decay", "accepted", "tested")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.accepted = self.tested = 0.0

    def add(self, accepted: float, tested: float) -> None:
        self.accepted = self.accepted * self._decay + accepted
        self.tested = self.tested * self._decay + tested

    def fade(self) -> None:
        """A round without a draft: the estimate stays, but what is seen next counts for more."""
        if self.tested > _FADED:
            self.accepted *= _FADE
            self.tested *= _FADE

    def alpha(self, prior: float, strength: float) -> float:
        return (self.accepted + strength * prior) / (self.tested + strength)


def request_rate() -> Rate:
    """What a request keeps of its own; a round without a draft is `add(0, 0)`, so that it returns to its domain's."""
    return Rate(_REQUEST)


class Domain:
    """A domain tag's rate, and what is due to it of exploration."""

    def __init__(self) -> None:
        self.rate = Rate(_DOMAIN)
        self.rounds = 0
        self.due = 0  # rounds that have to draft before it is explored enough


class Rates:
    """All domains and their common rate."""

    def __init__(self) -> None:
        self._all = Rate(_ALL)
        self._domains: dict[str, Domain] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._domains)

    def domain(self, name: str) -> Domain:
        found = self._domains.pop(name, None) or Domain()
        self._domains[name] = found
        if len(self._domains) > _MOST_DOMAINS:
            del self._domains[next(iter(self._domains))]
        return found

    def add(self, name: str, accepted: float, tested: float) -> None:
        self._all.add(accepted, tested)
        self.domain(name).rate.add(accepted, tested)

    def doubt(self, name: str, own: Rate) -> float:
        """How far above its estimate a request's alpha may lie: what a first draft is worth for being looked at.

        The upper end of a Wilson score interval (1927) less the estimate. What the estimate falls back on counts as
        evidence, as far as it was seen itself.
        """
        domain = self._domains.get(name)
        seen = min(self._all.tested, _STRENGTH) + (domain.rate.tested if domain is not None else 0.0)
        count = own.tested + min(seen, _REQUEST_STRENGTH)
        alpha, z2 = self.alpha(name, own), _DOUBT * _DOUBT
        spread = _DOUBT * math.sqrt(alpha * (1 - alpha) * count + z2 / 4)
        return (alpha * count + z2 / 2 + spread) / (count + z2) - alpha

    def alpha(self, name: str, own: Rate | None = None) -> float:
        """The estimate for a request of this domain, or for the domain itself."""
        domain = self._domains.get(name)
        alpha = self._all.alpha(_PRIOR, _STRENGTH)
        if domain is not None:
            alpha = domain.rate.alpha(alpha, _STRENGTH)
        return own.alpha(alpha, _REQUEST_STRENGTH) if own is not None else alpha

    def forget(self) -> None:
        """Another drafter serves: what is known of the old one's acceptance says nothing."""
        self._all = Rate(_ALL)
        for domain in self._domains.values():
            domain.rate = Rate(_DOMAIN)
