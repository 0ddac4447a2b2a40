"""Where traces for the atlas come from: the live stream, read without taking anything, or a learner's buffer on disk.

Says beside them what was counted while serving, and what is missing, so that a difference has its reason.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from learner.database import reading
from shared.artifact import same_target
from shared.counters import Counters
from shared.errors import ConfigError, TraceError
from shared.store import Store
from shared.trace import TraceRecord, decode

_PAGE = 64


@dataclass
class Source:
    """`accepted` and `tested` as counted while serving; `missing` says what of it is not among the traces."""

    name: str
    traces: list[TraceRecord]
    accepted: int
    tested: int
    missing: list[str]


def live(store: Store, target: str) -> Source:
    """Everything that the stream still holds. Raises ServiceDown."""
    traces, strangers = _decoded((data for _, data in _pages(store)), target)
    counters, depth = Counters.merge(store.counters().values()), store.stream_depth()
    accepted, tested = (int(value) for value in counters.alpha_counts())
    missing = _said(
        (int(counters.total("traces_dropped")), "traces were dropped by replicas"),
        (max(int(counters.total("traces_published")) - depth.length, 0), "traces were trimmed from the stream"),
        *strangers,
    )
    return Source("the live stream", traces, accepted, tested, missing)


def recorded(file: Path, target: str) -> Source:
    """What a learner has kept. Raises ConfigError."""
    try:
        with reading(file) as connection:
            blobs = [row["record"] for row in connection.execute("SELECT record FROM records ORDER BY ord")]
            row = connection.execute(
                "SELECT coalesce(sum(accepted), 0), coalesce(sum(tested), 0), "
                "coalesce(sum(ord NOT IN (SELECT ord FROM records)), 0), coalesce(sum(positions = 0), 0) FROM ledger"
            ).fetchone()
    except sqlite3.Error as error:
        raise ConfigError("--buffer", f"{file} is no learner's buffer ({error})", "Name a buffer.sqlite") from error
    traces, strangers = _decoded(iter(blobs), target)
    missing = _said(
        (row[2], "requests are only in the ledger: the buffer keeps the newest and a sample"),
        (row[3], "requests were not measured, so the ledger has no counts of theirs"),
        *strangers,
    )
    return Source(str(file), traces, int(row[0]), int(row[1]), missing)


def newest_buffer(home: Path) -> Path:
    """Raises ConfigError when no learner has kept anything in this home."""
    found = sorted(home.glob("learner/*/*/buffer.sqlite"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ConfigError("--buffer", f"no learner has kept traces in {home}", "Serve with the learner, or name a file")
    return found[-1]


def _pages(store: Store) -> Iterator[tuple[str, bytes]]:
    after = ""
    while page := store.peek_traces(after, count=_PAGE):
        yield from page
        after = page[-1][0]


def _decoded(blobs: Iterator[bytes], target: str) -> tuple[list[TraceRecord], list[tuple[int, str]]]:
    """The traces of this target, and how many others there are for which reason."""
    traces: list[TraceRecord] = []
    strangers: Counter[str] = Counter()
    for blob in blobs:
        try:
            record = decode(blob)
        except TraceError as error:
            strangers[f"traces cannot be read ({error})"] += 1
            continue
        if same_target(record.target, target):
            traces.append(record)
        else:
            strangers["traces are of another target"] += 1
    return traces, [(count, what) for what, count in strangers.items()]


def _said(*counts: tuple[int, str]) -> list[str]:
    return [f"{count:,} {what}" for count, what in counts if count]
