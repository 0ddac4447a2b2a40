"""When alpha of a domain has fallen: a short and a long average, and a Page-Hinkley test between them.

The statistic counts acceptances that are missing against the long average, less an allowance for every tested
position, and never falls below zero (Page 1954; Hinkley 1971). Its unit is acceptances, so windows of any size may
be fed. It acts on nothing: the learner decides what a drift means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DriftSettings:
    """Token counts are tested positions.

    Without drift the statistic passes `threshold` with a chance of about exp(-2 * slack * threshold / v), where v is
    the variance a position (0.25 at most, times a few for positions of one request). A fall by f is noticed after
    about threshold / (f - slack) positions.
    """

    short_tokens: float = 1000.0  # horizon of the short average
    long_tokens: float = 20000.0  # horizon of the long one
    slack: float = 0.05  # falls of alpha smaller than this are no drift
    threshold: float = 100.0
    least_tokens: float = 500.0  # of history before anything is missing
    prior_tokens: float = 2000.0  # weight of the other domains' average as a new domain's history


@dataclass
class DomainState:
    short: float = 0.0
    long: float = 0.0
    short_weight: float = 0.0  # tested positions in the average, at most its horizon
    long_weight: float = 0.0
    missing: float = 0.0


class DriftDetector:
    """One state a domain, fed in the order of time."""

    def __init__(self, settings: DriftSettings | None = None) -> None:
        self._settings = settings or DriftSettings()
        self._domains: dict[str, DomainState] = {}

    def update(self, domain: str, accepted: float, tested: float) -> float:
        """Takes one window's counts and returns the domain's score: 1 and above is a drift."""
        if tested <= 0:
            return self.score(domain)
        settings = self._settings
        state = self._domains.get(domain)
        if state is None:
            state = self._domains[domain] = self._newcomer()
        if state.long_weight >= settings.least_tokens:
            missing = (state.long - settings.slack) * tested - accepted
            # Bounded above, so that a domain that has recovered is seen to within a few thousand positions.
            state.missing = min(max(state.missing + missing, 0.0), 2 * settings.threshold)
        alpha = accepted / tested
        state.short, state.short_weight = _average(
            state.short, state.short_weight, alpha, tested, settings.short_tokens
        )
        state.long, state.long_weight = _average(state.long, state.long_weight, alpha, tested, settings.long_tokens)
        return self.score(domain)

    def score(self, domain: str) -> float:
        state = self._domains.get(domain)
        return state.missing / self._settings.threshold if state else 0.0

    def drifted(self, domain: str) -> bool:
        return self.score(domain) >= 1.0

    def averages(self, domain: str) -> tuple[float, float]:
        """The short and the long average of alpha; zeros for a domain never seen."""
        state = self._domains.get(domain, DomainState())
        return state.short, state.long

    def accept(self, domain: str) -> None:
        """Makes what is now the normal: the long average starts anew from the short one."""
        state = self._domains.get(domain)
        if state is not None:
            state.long, state.long_weight, state.missing = state.short, state.short_weight, 0.0

    def _newcomer(self) -> DomainState:
        """A new domain is expected to do as well as the others do: traffic that moves to it is a drift too."""
        known = [state for state in self._domains.values() if state.long_weight >= self._settings.least_tokens]
        weight = sum(state.long_weight for state in known)
        if not known:
            return DomainState()
        mean = sum(state.long * state.long_weight for state in known) / weight
        return DomainState(long=mean, long_weight=min(weight, self._settings.prior_tokens))


def _average(old: float, weight: float, new: float, new_weight: float, horizon: float) -> tuple[float, float]:
    """A running mean that forgets: its weight never exceeds the horizon."""
    total = weight + new_weight
    mean = (old * weight + new * new_weight) / total
    return mean, min(total, horizon)
