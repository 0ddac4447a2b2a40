"""What the dashboard page draws: the service's sums every ten seconds, kept in Redis, thinned out as they grow old.

A moment holds cumulative sums, so dropping one loses no count, only detail. The first replica to come keeps a moment
for all; which one that is does not matter. Without Redis there is no history, and nothing else is touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from serving.ticker import Ticker
from shared.counters import Counters, parse_field
from shared.errors import ServiceDown
from shared.store import Store

STEP_S = 10
TIERS = ((1800, 10), (6 * 3600, 60), (48 * 3600, 600))  # up to this age, one moment in so many seconds
DOMAINS = 16  # that have sums of their own: those with the most tokens
SUMS = ("accepted", "tested", "emitted")
EMITTED = SUMS.index("emitted")
DRIFTED = 1.0  # drift score from which on a domain counts as drifted

log = logging.getLogger(__name__)


def moment_of(counters: Counters, statuses: Mapping[str, Mapping[str, Any]], at: float) -> dict[str, Any]:
    """The service at one time; sums in the order of SUMS."""
    sums = _sums(counters)
    domains = sorted(sums, key=lambda domain: -sums[domain][EMITTED])
    versions = {status.get("drafter_version") for name, status in statuses.items() if name.startswith("replica:")}
    drift = statuses.get("learner", {}).get("drift", {})
    return {
        "at": at,
        "sums": [sum(parts) for parts in zip(*sums.values(), strict=True)] or [0.0, 0.0, 0.0],
        "drafted": counters.total("drafted"),
        "steps": counters.total("steps"),
        "domains": {domain: sums[domain] for domain in domains[:DOMAINS]},
        "versions": sorted(version for version in versions if version),
        "drifted": sorted(domain for domain, score in drift.items() if score >= DRIFTED),
    }


def outlived(times: Iterable[int], now: float) -> list[int]:
    """Moments that are too close to another for their age, or too old."""
    kept, gone = set(), []
    for at in sorted(times):
        width = next((width for age, width in TIERS if now - at <= age), None)
        slot = width and (width, at // width)
        if slot is None or slot in kept:
            gone.append(at)
        else:
            kept.add(slot)
    return gone


class Historian:
    """Keeps moments in a thread of its own, from `ticker.start` to `ticker.stop`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ticker = Ticker("history", self._tick, every_s=STEP_S)

    def keep(self, now: float) -> None:
        """This step's moment, unless another replica was faster. Raises ServiceDown."""
        at, times = int(now // STEP_S * STEP_S), self._store.moments()
        if at not in times:
            moment = moment_of(Counters.merge(self._store.counters().values()), self._store.statuses(), now)
            self._store.keep_moment(at, moment, drop=outlived(times, now))

    def _tick(self) -> None:
        try:
            self.keep(time.time())
        except ServiceDown as error:
            log.debug("no moment is kept: %s", error)
        except Exception:  # whoever wrote what is read there, this thread must outlive them
            log.exception("no moment is kept")


def _sums(counters: Counters) -> dict[str, list[float]]:
    """By domain, in one pass: there may be thousands of fields."""
    sums: dict[str, list[float]] = {}
    for field, value in counters.fields.items():
        name, tags = parse_field(field)
        if name in SUMS:
            sums.setdefault(tags.get("domain", ""), [0.0] * len(SUMS))[SUMS.index(name)] += value
    return sums
