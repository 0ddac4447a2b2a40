"""What the learner keeps of the traffic: a ledger of every request, and the records to learn from and to judge on.

Invariants: a stream id enters once; a domain keeps its newest requests and a uniform sample of its past; a probe is
never trained on, and neither is another request with its prompt. Features are stored beside their record as float16.
It knows nothing of Redis, models or decisions.
"""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from learner.database import Database, reading
from learner.example import Example, wanted_positions
from shared.trace import TraceRecord, decode

LEDGER_ROWS = 200_000
DOMAINS = 32  # names that are told apart; clients choose them, so there must be an end
OTHER = "other"  # all later names
_ERASED, _ATTEMPT = "erased", "attempt"
PROBE_EVERY, PROBES = 4, 24  # every 4th request of a domain is a probe until there are 24


@dataclass(frozen=True)
class Measured:
    """One request judged before anything was trained on it. Sums over its committed positions from 1 on."""

    version: str  # of the drafter that is called live
    gamma: int  # of the replay
    positions: int
    live_sum: float  # acceptances at depth 1
    static_sum: float
    live_expected_accepted: float  # by replay
    live_expected_tested: float
    live_expected_steps: float
    static_expected_accepted: float
    static_expected_tested: float
    rounds_accepted: float  # expected of the rounds that served it; 0 when several versions drafted them
    rounds_tested: float
    accepted: int  # counted while it was served
    tested: int


@dataclass(frozen=True)
class Arrival:
    """A request on its way in; without `measured` it only enters the ledger."""

    stream_id: str
    data: bytes  # the encoded record
    record: TraceRecord
    features: NDArray[np.float16] | None  # [prompt + n - 1, width]
    measured: Measured | None


_MEASURED = [field.name for field in fields(Measured)]
_LEDGER = ["stream_id", "request_id", "tenant", "domain", "finished_at", "prompt_hash", "seeded", *_MEASURED]
_INSERT = f"INSERT OR IGNORE INTO ledger ({', '.join(_LEDGER)}) VALUES ({', '.join(':' + name for name in _LEDGER)})"
_NOTHING = Measured("", 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)

# The lots are drawn once, so the smallest among everything older are a uniform sample of the past at any time.
_PRUNE = """
DELETE FROM records WHERE role = 'train' AND domain = :domain
    AND ord NOT IN (SELECT ord FROM records WHERE role = 'train' AND domain = :domain ORDER BY ord DESC LIMIT :recent)
    AND ord NOT IN (
        SELECT ord FROM (
            SELECT ord, lot FROM records WHERE role = 'train' AND domain = :domain
            ORDER BY ord DESC LIMIT -1 OFFSET :recent
        ) ORDER BY lot LIMIT :reservoir
    )
    AND ord NOT IN (SELECT ord FROM pinned)
"""
_TRAINABLE = "role = 'train' AND prompt_hash NOT IN (SELECT prompt_hash FROM records WHERE role = 'probe')"
_JUDGEABLE = """
SELECT ledger.ord, ledger.prompt_hash FROM ledger JOIN records USING (ord)
WHERE ord > ? AND role = 'train' AND NOT seeded AND positions > 0
    AND ledger.prompt_hash NOT IN (SELECT prompt_hash FROM ledger WHERE trained)
ORDER BY ord DESC
"""


class Buffer:
    """For the one thread that owns the database."""

    def __init__(self, database: Database, *, recent: int, reservoir: int) -> None:
        self._db, self._recent, self._reservoir = database, recent, reservoir
        self._names = {row["domain"] for row in database.rows("SELECT domain FROM domains")}
        self._erased: dict[str, float] = database.state(_ERASED) or {}  # tenant -> when that was asked for
        self._pin((database.state(_ATTEMPT) or {}).get("orders", ()))  # of an attempt that a restart interrupted

    # Arrival

    def domain_of(self, name: str) -> str:
        """The name under which a domain is kept: its own, or OTHER when there are too many."""
        return name if name in self._names or len(self._names) < DOMAINS else OTHER

    def knows(self, stream_id: str) -> bool:
        return bool(self._db.rows("SELECT 1 FROM ledger WHERE stream_id = ?", (stream_id,)))

    def add(self, arrivals: Sequence[Arrival]) -> int:
        """Takes them in one transaction and returns how many were new; when it returns, they are on disk."""
        with self._db.transaction():
            added = sum([self._add(arrival) for arrival in arrivals])
            for domain in {self.domain_of(arrival.record.domain) for arrival in arrivals}:
                self._prune(domain)
            self._db.run("DELETE FROM ledger WHERE ord <= ?", (self.newest() - LEDGER_ROWS,))
        return added

    def _add(self, arrival: Arrival) -> bool:
        record, measured = arrival.record, arrival.measured
        domain = self.domain_of(record.domain)
        prompt_hash = hash_prompt(record)
        row = {
            "stream_id": arrival.stream_id,
            "request_id": record.id,
            "tenant": record.tenant,
            "domain": domain,
            "finished_at": record.finished_at,
            "prompt_hash": prompt_hash,
            "seeded": record.sampling.seeded,
            **asdict(measured or _NOTHING),
        }
        entered = self._db.run(_INSERT, row)
        if not entered.rowcount:
            return False
        role = self._count(domain, probe=measured is not None and not record.sampling.seeded)
        if measured is not None:
            features = arrival.features
            self._db.run(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    entered.lastrowid,
                    record.tenant,
                    record.expires_at,
                    domain,
                    role,
                    len(wanted_positions(record, judging=False)),
                    int.from_bytes(hashlib.sha256(arrival.stream_id.encode()).digest()[:7], "big"),
                    prompt_hash,
                    0 if features is None else features.shape[1],
                    arrival.data,
                    None if features is None else np.ascontiguousarray(features, dtype="<f2").tobytes(),
                ),
            )
        return True

    def _count(self, domain: str, *, probe: bool) -> str:
        """Counts a request of the domain and says what it is for."""
        self._names.add(domain)
        self._db.run("INSERT OR IGNORE INTO domains VALUES (?, 0, 0)", (domain,))
        self._db.run("UPDATE domains SET seen = seen + 1 WHERE domain = ?", (domain,))
        found = self._db.rows("SELECT seen, probes FROM domains WHERE domain = ?", (domain,))[0]
        # The next one takes the place of a request that cannot be a probe.
        if not probe or found["probes"] >= PROBES or found["seen"] < PROBE_EVERY * (found["probes"] + 1):
            return "train"
        self._db.run("UPDATE domains SET probes = probes + 1 WHERE domain = ?", (domain,))
        return "probe"

    def _prune(self, domain: str) -> None:
        self._db.run(_PRUNE, {"domain": domain, "recent": self._recent, "reservoir": self._reservoir})

    def expire(self, now: float) -> int:
        """Removes records whose tenants let nobody keep them any longer, and returns how many.

        What an attempt is using goes when it has ended. The ledger keeps the sums of them, which hold no text.
        """
        sql = "DELETE FROM records WHERE expires_at BETWEEN 1 AND ? AND ord NOT IN (SELECT ord FROM pinned)"
        with self._db.transaction():
            removed = self._db.run(sql, (now,)).rowcount
            if removed:
                self._count_probes()
        return removed

    def erase(self, tenant: str, asked_at: float) -> int:
        """Removes everything of a tenant, the ledger's rows too; returns how many records there were."""
        with self._db.transaction():
            self._erased[tenant] = asked_at
            self._db.keep_state(_ERASED, self._erased)
            removed = self._db.run("DELETE FROM records WHERE tenant = ?", (tenant,)).rowcount
            self._db.run("DELETE FROM ledger WHERE tenant = ?", (tenant,))
            self._count_probes()
        return removed

    def erased(self, record: TraceRecord) -> bool:
        """Whether it comes too late: its tenant was erased after the request had ended."""
        return record.finished_at <= self._erased.get(record.tenant, 0.0)

    def _count_probes(self) -> None:
        """After probes have gone, later requests take their places."""
        self._db.run(
            "UPDATE domains SET probes = "
            "(SELECT count(*) FROM records WHERE role = 'probe' AND records.domain = domains.domain)"
        )

    # Choosing

    def newest(self) -> int:
        """The order of the last arrival; 0 before the first. It only ever grows."""
        return int(self._db.rows("SELECT max(ord) AS newest FROM ledger")[0]["newest"] or 0)

    def fresh_tokens(self, after: int) -> dict[str, int]:
        """Tokens to learn from that arrived later than `after`, by domain; domains without any are left out."""
        sql = "SELECT domain, sum(tokens) AS tokens FROM records WHERE role = 'train' AND ord > ? GROUP BY domain"
        return {row["domain"]: int(row["tokens"]) for row in self._db.rows(sql, (after,))}

    def sample(self, focus: Collection[str], *, tokens: int, replay_share: float, seed: int) -> list[int]:
        """Orders of at most about `tokens`: the newest of the domains in `focus`, and others for `replay_share` of all.

        Replay takes other domains in turn, at random within each, so that none is forgotten for being small.
        """
        rows = self._db.rows(f"SELECT ord, domain, tokens FROM records WHERE {_TRAINABLE} ORDER BY ord DESC")
        mine = [(row["ord"], row["tokens"]) for row in rows if row["domain"] in focus]
        others: dict[str, list[tuple[int, int]]] = {}
        for row in rows:
            if row["domain"] not in focus:
                others.setdefault(row["domain"], []).append((row["ord"], row["tokens"]))
        share = replay_share if others else 0.0
        chosen, taken = _take(mine, tokens * (1 - share))
        replay = round(taken * share / (1 - share)) if mine else tokens
        rng = random.Random(seed)
        for group in others.values():
            rng.shuffle(group)
        turns = [item for turn in range(max(map(len, others.values()), default=0)) for item in _turn(others, turn)]
        return chosen + _take(turns, replay)[0]

    def mark_trained(self, orders: Sequence[int]) -> None:
        """Their prompts are never judged on from now on."""
        self._db.run_many("UPDATE ledger SET trained = 1 WHERE ord = ?", [(order,) for order in orders])

    def begin_attempt(self, number: int, orders: Sequence[int], snapshot: int) -> None:
        """Keeps what an attempt learns from, over restarts too, until `end_attempt`."""
        with self._db.transaction():
            self.mark_trained(orders)
            self._db.keep_state(_ATTEMPT, {"number": number, "orders": list(orders), "snapshot": snapshot})
        self._pin(orders)

    def begun_attempt(self, number: int) -> tuple[list[int], int] | None:
        """(orders, snapshot) of an attempt that was begun and has not ended; None for another one."""
        kept = self._db.state(_ATTEMPT)
        if kept is None or kept["number"] != number:
            return None
        held = {row["ord"] for row in self._db.rows("SELECT ord FROM records JOIN pinned USING (ord)")}
        return [order for order in kept["orders"] if order in held], int(kept["snapshot"])

    def end_attempt(self) -> None:
        """What it learnt from may go."""
        self._db.run("DELETE FROM state WHERE key = ?", (_ATTEMPT,))
        self._db.run("DELETE FROM pinned")

    def judgeable(self, after: int) -> list[int]:
        """Orders that arrived later than `after` with prompts that were never trained on, newest first, each once."""
        prompts: dict[bytes, int] = {}
        for row in self._db.rows(_JUDGEABLE, (after,)):
            prompts.setdefault(row["prompt_hash"], row["ord"])
        return list(prompts.values())

    def probes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row in self._db.rows("SELECT domain, ord FROM records WHERE role = 'probe' ORDER BY ord"):
            found.setdefault(row["domain"], []).append(row["ord"])
        return found

    @contextmanager
    def pinned(self, orders: Sequence[int]) -> Iterator[None]:
        """These stay, whatever arrives meanwhile."""
        self._pin(orders)
        try:
            yield
        finally:
            self._db.run_many("DELETE FROM pinned WHERE ord = ?", [(order,) for order in orders])

    def _pin(self, orders: Sequence[int]) -> None:
        self._db.run_many("INSERT OR IGNORE INTO pinned VALUES (?)", [(order,) for order in orders])

    # Reading

    def load(self, order: int) -> Example:
        """Raises KeyError when it is not kept."""
        found = self._db.rows("SELECT record, features, width FROM records WHERE ord = ?", (order,))
        if not found:
            raise KeyError(order)
        record, features, width = found[0]
        if features is None:
            return Example(decode(record))
        rows = np.frombuffer(features, dtype="<f2").astype(np.float16).reshape(-1, width)
        return Example(decode(record), torch.from_numpy(rows))

    def tokens(self, orders: Sequence[int]) -> int:
        """Positions to learn from in these requests."""
        marks = ", ".join("?" * len(orders))
        return int(self._db.rows(f"SELECT sum(tokens) FROM records WHERE ord IN ({marks})", list(orders))[0][0] or 0)

    def measured(self, order: int) -> Measured:
        row = self._db.rows(f"SELECT {', '.join(_MEASURED)} FROM ledger WHERE ord = ?", (order,))[0]
        return Measured(**dict(row))

    def tenants(self, orders: Sequence[int]) -> list[str]:
        """Whose requests these are."""
        marks = ", ".join("?" * len(orders))
        sql = f"SELECT DISTINCT tenant FROM records WHERE ord IN ({marks}) ORDER BY tenant"
        return [row["tenant"] for row in self._db.rows(sql, list(orders))]

    def span(self, orders: Sequence[int]) -> tuple[float, float]:
        """First and last finish time of the given requests, in seconds since the epoch."""
        marks = ", ".join("?" * len(orders))
        sql = f"SELECT min(finished_at), max(finished_at) FROM ledger WHERE ord IN ({marks})"
        first, last = self._db.rows(sql, list(orders))[0]
        return float(first or 0.0), float(last or 0.0)

    def history(self, requests: int) -> list[tuple[int, str, float, int]]:
        """(order, domain, live sum, positions) of the newest measured requests, oldest first."""
        sql = (
            "SELECT ord, domain, live_sum, positions FROM ledger WHERE positions > 0 "
            "AND ord > (SELECT max(ord) FROM ledger) - ? ORDER BY ord"
        )
        return [tuple(row) for row in self._db.rows(sql, (requests,))]

    def sums_since(self, after: int) -> tuple[dict[str, tuple[float, ...]], int]:
        """(live, static, positions) by domain of what was measured later than `after`, and the order it reaches to."""
        sql = (
            "SELECT domain, sum(live_sum), sum(static_sum), sum(positions), max(ord) FROM ledger "
            "WHERE ord > ? AND positions > 0 GROUP BY domain"
        )
        rows = self._db.rows(sql, (after,))
        return {row[0]: tuple(row)[1:4] for row in rows}, max([after, *(row[4] for row in rows)])

    def expected_since(self, after: int) -> tuple[float, float, float]:
        """(positions, accepted by the live drafter, by the base) of what was measured later than `after`, by replay."""
        sql = (
            "SELECT sum(positions), sum(live_expected_accepted), sum(static_expected_accepted) FROM ledger "
            "WHERE ord > ? AND positions > 0"
        )
        positions, live, base = self._db.rows(sql, (after,))[0]
        return float(positions or 0), float(live or 0), float(base or 0)

    def counts(self) -> dict[str, dict[str, int]]:
        """Kept requests by domain and role."""
        found: dict[str, dict[str, int]] = {}
        for domain, role, count in self._db.rows("SELECT domain, role, count(*) FROM records GROUP BY domain, role"):
            found.setdefault(domain, {})[role] = count
        return found


def read_measurements(path: Path, after: int, limit: int = 1000) -> list[dict[str, Any]]:
    """Measured requests in order of arrival, from any thread; none while there is no buffer."""
    columns = ["ord AS `order`", "domain", "finished_at", "seeded", *_MEASURED]
    sql = f"SELECT {', '.join(columns)} FROM ledger WHERE ord > ? AND positions > 0 ORDER BY ord LIMIT ?"
    try:
        with reading(path) as connection:
            rows = [dict(row) for row in connection.execute(sql, (after, limit))]
    except sqlite3.OperationalError:
        return []
    return [{**row, "seeded": bool(row["seeded"])} for row in rows]


def hash_prompt(record: TraceRecord) -> bytes:
    return hashlib.sha256(record.prompt_ids.tobytes()).digest()[:16]


def _take(items: Sequence[tuple[int, int]], tokens: float) -> tuple[list[int], int]:
    """The first (order, tokens) items until `tokens` are reached; the last may reach beyond."""
    chosen, taken = [], 0
    for order, size in items:
        if taken >= tokens:
            break
        if size:
            chosen.append(order)
            taken += size
    return chosen, taken


def _turn(groups: dict[str, list[tuple[int, int]]], turn: int) -> list[tuple[int, int]]:
    return [group[turn] for group in groups.values() if turn < len(group)]
