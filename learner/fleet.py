"""What the replicas say of themselves: which version each serves, what rounds cost, and what was served lately.

Fed about once a second with heartbeats and cumulative counters; keeps sums and hands out differences. It knows which
version they should serve only to say who is late. It decides nothing, and a restart begins with an empty memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.counters import Counters
from shared.live_alpha import PREFIX, Served, served_by_domain

REPLICA = "replica:"  # of the names of their heartbeats
PIECES = 4  # in which the recent past is remembered
WINDOWS = 240  # of times, for each replica and version
TIMED = ("rounds", "levels", "draft_s", "verify_s")
_KEPT = (PREFIX, "timed.")

Sums = dict[str, Counters]  # by replica, its ended lives included


@dataclass
class _Behind:
    number: int  # of the pointer that it has not come to
    since: float
    counted: bool = False


class Fleet:
    """`past_tokens` are the tested tokens that the recent past holds at least; `grace_s` is how long a replica may take
    from the pointer to serving."""

    def __init__(self, *, past_tokens: int, grace_s: float) -> None:
        self._past_tokens, self._grace_s = past_tokens, grace_s
        self.versions: dict[str, str] = {}  # replica -> version that it serves
        self.round_s: tuple[float, ...] = ()  # seconds of a round by gamma, mean over replicas
        self.sums: Sums = {}
        self.served = 0.0  # tokens emitted since the first look
        self.late = Counters()
        self._emitted: dict[tuple[str, str], float] = {}
        self._past: deque[Sums] = deque(maxlen=PIECES + 2)
        self._times: dict[tuple[str, str], deque[list[float]]] = {}
        self._behind: dict[str, _Behind] = {}

    def look(
        self, statuses: Mapping[str, Mapping[str, Any]], epochs: Mapping[tuple[str, str], Mapping[str, float]]
    ) -> None:
        """Takes in heartbeats and cumulative counters, (replica, epoch) -> counts."""
        alive = {name.removeprefix(REPLICA): told for name, told in statuses.items() if name.startswith(REPLICA)}
        self.versions = {
            name: told["drafter_version"]
            for name, told in alive.items()
            if told.get("drafter_version") and not told.get("draining")
        }
        prices = [told["round_s"] for told in alive.values() if told.get("round_s")]
        if prices:
            self.round_s = tuple(float(mean) for mean in np.mean([p for p in prices if len(p) == len(prices[0])], 0))
        self._count_emitted(epochs)
        before, self.sums = self.sums, _sums(epochs)
        self._time(before)
        if not self._past or _tested(self.sums) - _tested(self._past[-1]) >= self._past_tokens / PIECES:
            self._past.append(self.sums)

    def recent(self, version: str) -> dict[str, Served]:
        """What this version has served lately, by domain; all that replicas have counted, until that is enough."""
        oldest = self._past[0] if len(self._past) > PIECES else {}
        return self.since(oldest, version)

    def since(self, start: Sums, version: str, replicas: Callable[[str], bool] = lambda _: True) -> dict[str, Served]:
        """By domain, of the chosen replicas."""
        found: dict[str, Served] = {}
        for replica, now in self.sums.items():
            if replicas(replica):
                came = now.minus(start.get(replica, Counters()))
                for domain, served in served_by_domain(came.fields, version).items():
                    found[domain] = found.get(domain, Served()).plus(served)
        return found

    def times(self, version: str, replicas: Callable[[str], bool] = lambda _: True) -> NDArray[np.float64]:
        """[windows, 4] TIMED of each look in which this version drafted."""
        rows = [
            row
            for (replica, name), kept in self._times.items()
            if name == version and replicas(replica)
            for row in kept
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, len(TIMED))

    def note_lag(self, wanted: Callable[[str], tuple[str, int]], now: float) -> dict[str, str]:
        """replica -> version of those that have not come to theirs in time; each counts once for each pointer."""
        found = {}
        for replica, version in self.versions.items():
            name, number = wanted(replica)
            if version == name:
                self._behind.pop(replica, None)
                continue
            behind = self._behind.get(replica)
            if behind is None or behind.number != number:
                behind = self._behind[replica] = _Behind(number, now)
            if now - behind.since > self._grace_s:
                found[replica] = version
                if not behind.counted:
                    behind.counted = True
                    self.late.add("replicas_late")
        for replica in self._behind.keys() - self.versions.keys():
            del self._behind[replica]
        return found

    def _count_emitted(self, epochs: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
        first = not self._emitted
        for key, fields in epochs.items():
            emitted = Counters(fields).total("emitted")
            self.served += 0.0 if first else max(emitted - self._emitted.get(key, 0.0), 0.0)
            self._emitted[key] = emitted

    def _time(self, before: Sums) -> None:
        for replica, now in self.sums.items():
            if replica not in before:
                continue
            came = now.minus(before[replica])
            for version in _timed_versions(came):
                row = [came.total(f"timed.{name}", version=version) for name in TIMED]
                if row[0]:
                    self._times.setdefault((replica, version), deque(maxlen=WINDOWS)).append(row)
        newest = list(dict.fromkeys(version for _, version in reversed(self._times)))[:PIECES]
        self._times = {key: kept for key, kept in self._times.items() if key[1] in newest}


def only(sums: Sums, versions: Collection[str]) -> Sums:
    """What is worth keeping on disk of a moment, to compare these versions with it later."""
    return {
        replica: Counters({key: value for key, value in counts.fields.items() if _version(key) in versions})
        for replica, counts in sums.items()
    }


def _sums(epochs: Mapping[tuple[str, str], Mapping[str, float]]) -> Sums:
    found: dict[str, list[dict[str, float]]] = {}
    for (replica, _), fields in epochs.items():
        found.setdefault(replica, []).append({k: v for k, v in fields.items() if k.startswith(_KEPT)})
    return {replica: Counters.merge(parts) for replica, parts in found.items()}


def _tested(sums: Sums) -> float:
    return sum(counts.total(f"{PREFIX}tested") for counts in sums.values())


def _version(key: str) -> str:
    return Counters({key: 0}).tag_values("version")[0] if "version=" in key else ""


def _timed_versions(counts: Counters) -> list[str]:
    return Counters({k: v for k, v in counts.fields.items() if k.startswith("timed.") and v}).tag_values("version")
