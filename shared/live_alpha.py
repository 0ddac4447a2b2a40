"""Alpha as it was served, with an interval by request: what a finished request adds to the counters, and reading it.

Positions of one request are not independent, so the variance needs sums of squares over requests; those add up over
replicas like any other counter. A request that several versions drafted for is a part of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shared.counters import Counters, parse_field

PREFIX = "served."


@dataclass(frozen=True)
class Served:
    """Sums over finished requests that were allowed to speculate, plain steps included."""

    requests: float = 0
    steps: float = 0
    accepted: float = 0
    tested: float = 0
    accepted_squared: float = 0
    accepted_tested: float = 0
    tested_squared: float = 0

    @property
    def alpha(self) -> float:
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def accepted_per_step(self) -> float:
        """Extra tokens of a step, whether it drafted or not."""
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def variance(self) -> float:
        """Of alpha, by the linearised ratio estimator over requests (Cochran 1977, section 6.3)."""
        if self.requests < 2 or not self.tested:
            return float("inf")
        alpha = self.alpha
        squares = self.accepted_squared - 2 * alpha * self.accepted_tested + alpha**2 * self.tested_squared
        return max(squares, 0.0) / self.tested**2 * self.requests / (self.requests - 1)

    def plus(self, other: Served) -> Served:
        return Served(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Served)))


def add_request(counters: Counters, domain: str, version: str, *, steps: int, accepted: int, tested: int) -> None:
    """A finished request's part under this drafter version."""
    found = Served(1, steps, accepted, tested, accepted**2, accepted * tested, tested**2)
    for field in fields(Served):
        counters.add(PREFIX + field.name, getattr(found, field.name), domain=domain, version=version)


def served_by_domain(counters: Mapping[str, float], version: str) -> dict[str, Served]:
    """The sums of one version; a request without a domain counts under the empty name."""
    found: dict[str, dict[str, float]] = {}
    for key, value in counters.items():
        if not key.startswith(PREFIX):
            continue
        name, tags = parse_field(key)
        if tags.get("version", "") == version:
            found.setdefault(tags.get("domain", ""), {})[name.removeprefix(PREFIX)] = value
    known = {field.name for field in fields(Served)}
    return {domain: Served(**{name: v for name, v in sums.items() if name in known}) for domain, sums in found.items()}
