"""The learner's memory on disk: one SQLite file (WAL) for what arrived, what is kept, versions and resume state.

Every change is one transaction, on disk when it returns, so that a kill at any moment leaves whole requests only. One
thread writes; `reading` opens a second, read-only connection for others. It knows the schema, not its use.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.trace import SCHEMA_VERSION

_TABLES_SCHEMA = 2
SCHEMA = _TABLES_SCHEMA * 1000 + SCHEMA_VERSION  # its rows hold encoded traces: another trace schema cannot be read
log = logging.getLogger(__name__)

# `ledger` has a row for every request that ever arrived (the newest LEDGER_ROWS of them), `records` the few that are
# kept to learn from or to be judged on.
_TABLES = """
CREATE TABLE ledger (
    ord INTEGER PRIMARY KEY AUTOINCREMENT,
    stream_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    domain TEXT NOT NULL,
    finished_at REAL NOT NULL,
    prompt_hash BLOB NOT NULL,
    seeded INTEGER NOT NULL,
    trained INTEGER NOT NULL DEFAULT 0,
    version TEXT NOT NULL DEFAULT '',
    gamma INTEGER NOT NULL DEFAULT 0,
    positions INTEGER NOT NULL DEFAULT 0,
    live_sum REAL NOT NULL DEFAULT 0,
    static_sum REAL NOT NULL DEFAULT 0,
    live_expected_accepted REAL NOT NULL DEFAULT 0,
    live_expected_tested REAL NOT NULL DEFAULT 0,
    live_expected_steps REAL NOT NULL DEFAULT 0,
    static_expected_accepted REAL NOT NULL DEFAULT 0,
    static_expected_tested REAL NOT NULL DEFAULT 0,
    rounds_accepted REAL NOT NULL DEFAULT 0,
    rounds_tested REAL NOT NULL DEFAULT 0,
    accepted INTEGER NOT NULL DEFAULT 0,
    tested INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX trained_prompts ON ledger (prompt_hash) WHERE trained;
CREATE TABLE records (
    ord INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    expires_at REAL NOT NULL,
    domain TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('train', 'probe')),
    tokens INTEGER NOT NULL,
    lot INTEGER NOT NULL,
    prompt_hash BLOB NOT NULL,
    width INTEGER NOT NULL,
    record BLOB NOT NULL,
    features BLOB
);
CREATE INDEX kept ON records (role, domain, ord, tokens, lot, prompt_hash);
CREATE TABLE domains (domain TEXT PRIMARY KEY, seen INTEGER NOT NULL, probes INTEGER NOT NULL);
CREATE TABLE versions (
    version TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    blob_hash TEXT NOT NULL,
    blob BLOB NOT NULL,
    facts TEXT NOT NULL,
    registered INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Database:
    """The writing connection."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file of another release; a broken file is set aside, and a new one begun."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._connection = _open(path)
        except sqlite3.OperationalError as error:
            raise ConfigError("home", f"{path} cannot be opened ({error})", "Make the folder writable.") from error
        except sqlite3.DatabaseError as error:
            aside = path.with_suffix(f".broken-{time.time():.0f}")
            log.error("%s is broken (%s): it is set aside as %s, and learning starts anew", path, error, aside.name)
            path.rename(aside)
            self._connection = _open(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; joins the one that is open."""
        if self._connection.in_transaction:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk is often noticed by COMMIT, which then leaves the transaction open, and sometimes ends it
            # itself. Left open, later writes would join it and never be on disk.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def run(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        with self.transaction():
            self._connection.executemany(sql, rows)

    def rows(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def state(self, key: str) -> Any:
        """What was last kept under `key`; None before."""
        found = self._connection.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return json.loads(found["value"]) if found else None

    def keep_state(self, key: str, value: Any) -> None:
        """JSON; in the open transaction, if there is one."""
        self.run("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))

    def erase_versions(self, tainted: Callable[[bytes], bool]) -> list[str]:
        """Removes versions by their blob, and the champion's name if it was one; returns their names, newest first."""
        found = self.rows("SELECT version, blob FROM versions ORDER BY number DESC")
        names = [row["version"] for row in found if tainted(row["blob"])]
        self.run_many("DELETE FROM versions WHERE version = ?", [(name,) for name in names])
        champion = self.state("champion")
        if champion is not None and champion["version"] in names:
            self.run("DELETE FROM state WHERE key = 'champion'")
        return names

    def compact(self) -> bool:
        """Writes the file anew, so that nothing deleted is left in it. False without room, or while somebody reads."""
        try:
            self._connection.execute("VACUUM")
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.OperationalError as error:
            log.error("%s cannot be compacted: %s", self.path, error)
            return False
        return not busy

    def close(self) -> None:
        self._connection.close()


def of_the_disk(error: Exception) -> bool:
    """Whether it is the disk that is full or failing, so that waiting may help."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of it says more of the same
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection for any thread. Raises sqlite3.OperationalError while there is no file."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def _open(path: Path) -> sqlite3.Connection:
    # Autocommit: transactions are opened by `transaction` alone.
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit that is reported must survive a power cut too: the stream's copy is given up after it.
        connection.execute("PRAGMA synchronous = FULL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
        elif version != SCHEMA:
            raise ConfigError(
                "home", f"{path} is of schema {version}, this release reads {SCHEMA}", "Move the file away."
            )
        connection.execute("CREATE TEMP TABLE pinned (ord INTEGER PRIMARY KEY)")
    except BaseException:
        connection.close()
        raise
    return connection
