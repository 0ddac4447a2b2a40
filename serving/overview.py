"""What one replica can tell of the whole service: its own counters at once, everybody else's from Redis.

For `/metrics` and the dashboard page. With Redis away it tells of its own replica alone, and why. Reading waits at most
as long as a Redis command may; nothing here is called on the way of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serving.history import moment_of
from serving.metrics import text_of
from shared.counters import Counters, parse_field
from shared.errors import ServiceDown, Unreadable
from shared.metrics import REDIS, Sample, learner_samples, serving_samples
from shared.store import Champion, Store

REPLICA = "replica:"  # before its name, in a heartbeat's
LEARNER_FIELDS = ("state", "trouble", "attempts", "promotions", "decisions", "next", "drift")


@dataclass(frozen=True)
class Own:
    """Of the replica that answers."""

    counters: Mapping[str, float]
    status: Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """The service at one moment. `counters` of replicas that live; `ended` is the sum of those that lived before."""

    counters: Mapping[str, Mapping[str, float]]
    statuses: Mapping[str, Mapping[str, Any]]
    ended: Counters = field(default_factory=Counters)
    champion: Champion | None = None
    trouble: tuple[str, ...] = ()

    @property
    def total(self) -> Counters:
        return Counters.merge([self.ended.fields, *self.counters.values()])


class Overview:
    """`own` gives nothing until the replica has loaded."""

    def __init__(
        self, replica_id: str, store: Store | None = None, own: Callable[[], Own | None] = lambda: None
    ) -> None:
        self._id, self._store, self._own = replica_id, store, own

    def metrics(self) -> bytes:
        """Of all replicas and the learner, in Prometheus' text format."""
        reading = self._read()
        parts: list[tuple[str, Iterator[Sample]]] = [
            (_short(name), serving_samples(counters, reading.statuses.get(REPLICA + name, {})))
            for name, counters in reading.counters.items()
        ]
        parts.append(("", learner_samples(reading.statuses.get("learner", {}))))
        parts.append(("", iter([Sample(REDIS, "", float(not reading.trouble))])))
        return text_of(parts)

    def data(self, after: float) -> dict[str, Any]:
        """What the page draws: the moments after a time, and everything as it is now. Counts, never ratios."""
        reading, now = self._read(), time.time()
        total, moments = reading.total, list[dict[str, Any]]()
        if self._store is not None and not reading.trouble:
            try:
                times = sorted(at for at in self._store.moments() if at > after)
                moments = self._store.read_moments(times)
            except ServiceDown as error:
                reading = replace(reading, trouble=(str(error),))
        learner = reading.statuses.get("learner")
        return {
            "trouble": list(reading.trouble),
            "moments": moments,
            "now": moment_of(total, reading.statuses, now),
            "alpha": total.alpha_rows(),
            "positions": _numbered(total, ("accepted_at", "tested_at")),
            "gammas": _numbered(total, ("gamma_at",)),
            "traces": {name: total.total(name) for name in ("traces_published", "traces_dropped", "features_dropped")},
            "replicas": [
                {"name": _short(name.removeprefix(REPLICA)), **status}
                for name, status in sorted(reading.statuses.items())
                if name.startswith(REPLICA)
            ],
            "champion": asdict(reading.champion) if reading.champion else None,
            "learner": {name: learner[name] for name in LEARNER_FIELDS if name in learner} if learner else None,
        }

    def _read(self) -> Reading:
        own = self._own()
        mine = {self._id: own.counters} if own else {}
        status = {REPLICA + self._id: own.status} if own else {}
        if self._store is None:
            return Reading(mine, status, trouble=("This service has no Redis: only this replica is shown.",))
        try:
            epochs, statuses = self._store.counters(), self._store.statuses()
            champion = self._champion(self._store)
        except ServiceDown as error:
            return Reading(mine, status, trouble=(f"{error}. Only this replica is shown.",))
        newest: dict[str, str] = {}
        for name, epoch in epochs:
            newest[name] = max(epoch, newest.get(name, ""))
        living = {key for key in epochs if newest[key[0]] == key[1] and REPLICA + key[0] in statuses}
        ended = Counters.merge(epochs[key] for key in epochs if key not in living and key[0] != self._id)
        counters = {name: epochs[name, epoch] for name, epoch in sorted(living)}
        return Reading({**counters, **mine}, {**statuses, **status}, ended, champion)

    @staticmethod
    def _champion(store: Store) -> Champion | None:
        try:
            return store.champion()
        except Unreadable:  # the learner says so and mends it
            return None


def _numbered(counters: Counters, names: tuple[str, ...]) -> list[dict[str, float]]:
    """Rows of the counters `name.NUMBER`, by number."""
    rows: dict[int, dict[str, float]] = {}
    for key, value in counters.fields.items():
        name, _, number = parse_field(key)[0].partition(".")
        if name in names:
            rows.setdefault(int(number), dict.fromkeys(names, 0.0))[name] += value
    return [{"number": number, **row} for number, row in sorted(rows.items())]


def _short(name: str) -> str:
    """Serve's names end in what tells replicas apart."""
    return name.rpartition("#")[2]
