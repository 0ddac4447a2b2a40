"""The buffer's promises: each stream id once, the newest and a fair sample of the past, probes apart, nothing lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.buffer import DOMAINS, OTHER, PROBE_EVERY, PROBES, Arrival, Buffer, Measured, read_measurements
from learner.database import Database, of_the_disk
from shared.errors import ConfigError
from shared.store import Store
from shared.trace import Sampling, encode
from tests.learner.records import random_example

MEASURED = Measured(
    version="base",
    gamma=2,
    positions=8,
    live_sum=3.0,
    static_sum=2.0,
    live_expected_accepted=2.5,
    live_expected_tested=6.5,
    live_expected_steps=4.0,
    static_expected_accepted=1.5,
    static_expected_tested=5.5,
    rounds_accepted=2.75,
    rounds_tested=6.25,
    accepted=3,
    tested=6,
)


def arrival(number: int, domain: str = "chat", *, measured: Measured | None = MEASURED, **shape: object) -> Arrival:
    example = random_example(number, domain=domain, **shape)
    assert example.features is not None
    features = example.features.numpy() if measured is not None else None
    return Arrival(f"{number}-0", encode(example.record), example.record, features, measured)


def seeded(arrival: Arrival) -> Arrival:
    return replace(arrival, record=replace(arrival.record, sampling=Sampling(seeded=True)))


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "deep" / "buffer.sqlite")


def buffer_of(database: Database, recent: int = 1000, reservoir: int = 0) -> Buffer:
    return Buffer(database, recent=recent, reservoir=reservoir)


def test_what_comes_out_is_what_went_in(database: Database) -> None:
    buffer, sent = buffer_of(database), arrival(1)
    assert buffer.add([sent]) == 1
    found = buffer.load(1)
    assert encode(found.record) == sent.data
    assert found.features is not None
    assert found.features.dtype == torch.float16
    assert np.array_equal(found.features.numpy(), sent.features)
    assert buffer.measured(1) == MEASURED
    with pytest.raises(KeyError):
        buffer.load(2)


def test_a_stream_id_enters_once(database: Database) -> None:
    buffer = buffer_of(database)
    assert buffer.add([arrival(1), arrival(2), arrival(1)]) == 2
    assert buffer.add([arrival(2), arrival(3)]) == 1
    assert [buffer.knows(f"{number}-0") for number in range(1, 5)] == [True, True, True, False]
    assert buffer.counts() == {"chat": {"train": 3}}


def test_half_a_batch_never_enters(database: Database) -> None:
    buffer = buffer_of(database)
    broken = replace(arrival(2), features=np.zeros((0,), dtype=np.float16))  # no width: fails after the first went in
    with pytest.raises(IndexError):
        buffer.add([arrival(1), broken])
    assert buffer.newest() == 0
    assert buffer.add([arrival(1)]) == 1


def test_an_unmeasured_request_is_counted_and_not_kept(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(1, measured=None), arrival(2)])
    assert buffer.knows("1-0")
    assert buffer.counts() == {"chat": {"train": 1}}
    assert [row["order"] for row in read_measurements(database.path, 0)] == [2]


def test_each_domain_keeps_its_newest_and_a_uniform_sample_of_its_past(tmp_path: Path) -> None:
    recent, reservoir, requests, buffers = 3, 5, 24, 80
    past = Counter[int]()
    for seed in range(buffers):
        buffer = buffer_of(Database(tmp_path / f"{seed}.sqlite"), recent, reservoir)
        for first in range(0, requests, 4):
            # Seeded, so that none becomes a probe. The lot follows the stream id.
            buffer.add(
                [
                    replace(seeded(arrival(number, outputs=3)), stream_id=f"s{seed}-{number}")
                    for number in range(first, first + 4)
                ]
            )
        buffer.add([arrival(99, "code", outputs=3)])
        assert buffer.counts() == {"chat": {"train": recent + reservoir}, "code": {"train": 1}}
        kept = [order for order in range(1, requests + 1) if _kept(buffer, order)]
        assert kept[-recent:] == list(range(requests - recent + 1, requests + 1))
        past.update(kept[:-recent])
    # Each of the 21 older requests stays with chance 5/21; four standard errors of a share over 80 buffers.
    share = reservoir / (requests - recent)
    error = 4 * (share * (1 - share) / buffers) ** 0.5
    for order in range(1, requests - recent + 1):
        assert abs(past[order] / buffers - share) < error


def _kept(buffer: Buffer, order: int) -> bool:
    try:
        buffer.load(order)
    except KeyError:
        return False
    return True


def test_pinned_requests_stay_until_they_are_let_go(database: Database) -> None:
    buffer = buffer_of(database, recent=2)
    buffer.add([arrival(1), arrival(2)])
    with buffer.pinned([1]), buffer.pinned([2]):
        buffer.add([arrival(number) for number in range(3, 7)])
        assert [order for order in range(1, 7) if _kept(buffer, order) and order % PROBE_EVERY] == [1, 2, 5, 6]
    buffer.add([arrival(7)])
    assert [order for order in range(1, 8) if _kept(buffer, order) and order % PROBE_EVERY] == [6, 7]


def test_probes_are_the_first_of_a_domain_here_and_there_and_never_learnt_from(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(number, outputs=3) for number in range(1, PROBE_EVERY * (PROBES + 3) + 1)])
    probes = buffer.probes()["chat"]
    assert probes == [PROBE_EVERY * count for count in range(1, PROBES + 1)]
    learnt = buffer.sample(["chat"], tokens=10**9, replay_share=0.0, seed=0)
    assert not set(probes) & set(learnt)
    assert not set(probes) & set(buffer.judgeable(0))
    assert len(learnt) == PROBE_EVERY * (PROBES + 3) - PROBES


def test_a_request_that_cannot_be_a_probe_leaves_its_place_to_the_next(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(number) for number in range(1, PROBE_EVERY)])
    buffer.add([seeded(arrival(PROBE_EVERY)), arrival(PROBE_EVERY + 1, measured=None), arrival(PROBE_EVERY + 2)])
    assert buffer.probes() == {"chat": [PROBE_EVERY + 2]}


def test_the_prompt_of_a_probe_is_not_learnt_from_under_another_name(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(number) for number in range(1, PROBE_EVERY + 1)])
    again = replace(arrival(PROBE_EVERY), stream_id="again")
    buffer.add([again])
    assert PROBE_EVERY + 1 not in buffer.sample(["chat"], tokens=10**9, replay_share=0.0, seed=0)


def test_a_sample_takes_the_newest_of_the_focus_and_replays_the_others_in_turn(database: Database) -> None:
    buffer = buffer_of(database)
    for first, domain in ((1, "chat"), (8, "code"), (15, "sql")):
        # 9 outputs, of which token 0 is not learnt: 8 tokens each
        buffer.add([seeded(arrival(number, domain)) for number in range(first, first + 7)])
    chosen = buffer.sample(["sql"], tokens=64, replay_share=0.5, seed=0)
    assert chosen[:4] == [21, 20, 19, 18]
    replayed = sorted(order > 7 for order in chosen[4:])
    assert replayed == [False, False, True, True], "two of chat and two of code"
    assert chosen == buffer.sample(["sql"], tokens=64, replay_share=0.5, seed=0)
    assert set(chosen[4:]) != set(buffer.sample(["sql"], tokens=64, replay_share=0.5, seed=3)[4:])
    assert buffer.tokens(chosen) == 64
    # Replay keeps its share when the focus has little to offer, and the focus takes all when there is nothing else.
    assert len(buffer.sample(["sql"], tokens=10**6, replay_share=0.5, seed=0)) == 14
    assert len(buffer.sample(["sql", "code", "chat"], tokens=10**6, replay_share=0.5, seed=0)) == 21
    assert len(buffer.sample([], tokens=32, replay_share=0.5, seed=0)) == 4


def test_only_later_requests_with_prompts_of_their_own_are_judged_on(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(1), arrival(2)])
    buffer.mark_trained([1])
    repeated = replace(arrival(1), stream_id="repeats a trained prompt")
    twice = replace(arrival(4), stream_id="the same prompt again")
    buffer.add([arrival(3), arrival(4), twice, repeated, arrival(6), seeded(arrival(5))])
    # Orders: 3, 4, 5 (prompt of 4 again), 6 (trained prompt), 7, 8 (seeded)
    assert buffer.judgeable(2) == [7, 5, 3]
    assert buffer.judgeable(0) == [7, 5, 3, 2], "2 was never trained on"
    assert buffer.judgeable(5) == [7]


def test_fresh_tokens_and_domains_count_from_an_order_on(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(1), arrival(2, "sql"), arrival(3, "sql", measured=None)])
    assert [buffer.fresh_tokens(order) for order in range(3)] == [{"chat": 8, "sql": 8}, {"sql": 8}, {}]
    assert buffer.span([1, 2]) == (1.0, 2.0)
    assert buffer.sums_since(0) == ({"chat": (3.0, 2.0, 8), "sql": (3.0, 2.0, 8)}, 2)
    assert buffer.sums_since(2) == ({}, 2)
    assert buffer.history(2) == [(2, "sql", 3.0, 8)]


def test_there_is_an_end_to_the_names_of_domains(database: Database) -> None:
    buffer = buffer_of(database)
    buffer.add([arrival(number, f"domain {number}") for number in range(1, DOMAINS + 4)])
    assert buffer.counts()[OTHER] == {"train": 3}
    assert len(buffer.counts()) == DOMAINS + 1
    assert buffer_of(database).domain_of("domain 1") == "domain 1"
    assert buffer_of(database).domain_of("another") == OTHER


def test_measurements_carry_what_the_demo_shows(database: Database) -> None:
    buffer_of(database).add([arrival(1), seeded(arrival(2))])
    first, second = read_measurements(database.path, 0)
    assert first["order"] == 1
    assert (first["domain"], first["finished_at"], first["version"], first["seeded"]) == ("chat", 1.0, "base", False)
    assert (first["live_sum"], first["static_sum"], first["positions"]) == (3.0, 2.0, 8)
    assert (first["live_expected_accepted"], first["live_expected_tested"]) == (2.5, 6.5)
    assert (first["static_expected_accepted"], first["static_expected_tested"]) == (1.5, 5.5)
    assert (first["accepted"], first["tested"]) == (3, 6)
    assert second["seeded"] is True
    assert read_measurements(database.path, 1) == [second]
    assert read_measurements(database.path.with_name("none"), 0) == []


def test_state_survives_and_belongs_to_its_transaction(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    database = Database(path)
    database.keep_state("progress", {"attempts": 3})
    with suppress(RuntimeError), database.transaction():
        database.keep_state("progress", {"attempts": 4})
        raise RuntimeError
    database.close()
    again = Database(path)
    assert again.state("progress") == {"attempts": 3}
    assert again.state("unknown") is None


def test_a_broken_file_is_set_aside_and_a_foreign_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 20)
    buffer_of(Database(path)).add([arrival(1)])
    assert [p.name for p in tmp_path.glob("*.broken-*")]
    database = Database(path)
    assert buffer_of(database).newest() == 1
    database.run("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="schema 99"):
        Database(path)


@pytest.mark.parametrize("broken", ["the insert", "the commit"])
def test_on_a_full_disk_nothing_is_half_kept_and_later_writes_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "buffer.sqlite"
    database = Database(path)
    buffer = buffer_of(database)
    buffer.add([arrival(1)])
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    connection = database._connection

    class FullAtCommit:
        """A disk that is full when the log is to be written, as it mostly is noticed."""

        def __getattr__(self, name: str) -> object:
            return getattr(connection, name)

        def execute(self, sql: str, *values: object) -> object:
            if sql == "COMMIT":
                raise full
            return connection.execute(sql, *values)

    if broken == "the insert":
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    else:
        monkeypatch.setattr(database, "_connection", FullAtCommit())
    with pytest.raises(sqlite3.OperationalError) as failed:
        buffer.add([arrival(number, outputs=400, prompt=400) for number in range(2, 9)])
    assert of_the_disk(failed.value)
    assert not of_the_disk(sqlite3.OperationalError("no such table: ledger"))
    assert not connection.in_transaction, "or what comes later would join it, and be acknowledged unwritten"
    assert buffer.newest() == 1
    monkeypatch.setattr(database, "_connection", connection)
    connection.execute("PRAGMA max_page_count = 1000000")
    assert buffer.add([arrival(2)]) == 1
    database.close()
    again = Database(path)
    assert [row["stream_id"] for row in again.rows("SELECT stream_id FROM ledger ORDER BY ord")] == ["1-0", "2-0"]
    again.close()


# Adds every record of the stream to the buffer, and is killed before the acknowledgement of the `stop`-th.
_CHILD = """
import os, signal, sys
from pathlib import Path
from learner.buffer import Arrival, Buffer
from learner.database import Database, of_the_disk
from shared.store import Store
from shared.trace import decode
from tests.learner.test_buffer import MEASURED
url, prefix, path, stop = sys.argv[1:]
store = Store(url, prefix)
buffer = Buffer(Database(Path(path)), recent=1000, reservoir=0)
added = 0
while True:
    for id, data in store.read_traces("learner", count=3, block_ms=0):
        if buffer.knows(id):
            store.acknowledge([id])
            continue
        buffer.add([Arrival(id, data, decode(data), None, MEASURED)])
        added += 1
        if added == int(stop):
            os.kill(os.getpid(), signal.SIGKILL)
        store.acknowledge([id])
    depth = store.stream_depth()
    if not depth.pending and not depth.lag:
        break
"""


def test_a_kill_between_storing_and_acknowledging_loses_nothing_and_doubles_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    prefix, path = f"test-{os.getpid()}-kill", tmp_path / "buffer.sqlite"
    store = Store(redis_url, prefix)
    sent = [store.append_trace(encode(arrival(number).record), max_bytes=2**24) for number in range(10)]
    for stop, code in (("4", -signal.SIGKILL), ("3", -signal.SIGKILL), ("99", 0)):
        child = subprocess.run([sys.executable, "-c", _CHILD, redis_url, prefix, str(path), stop], check=False)
        assert child.returncode == code
    database = Database(path)
    assert [row["stream_id"] for row in database.rows("SELECT stream_id FROM ledger ORDER BY ord")] == sent
    depth = store.stream_depth()
    assert (depth.pending, depth.lag) == (0, 0)
    store.close()
