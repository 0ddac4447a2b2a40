"""The store against a real server: delivery, loss that is counted, protection of the champion, outages."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

import pytest

from ops.local_redis import find_server, launch_server
from ops.ports import free_port
from ops.processes import Child, Supervisor
from shared.errors import ConfigError, ServiceDown, Unreadable
from shared.store import BLOBS_KEPT, Canary, Champion, Store
from shared.stream import DEAD_KEEP, StreamDepth

ROOMY = 10**9  # a byte cap that no test reaches


def champion(number: int, *, blob: str = "", base: str = "b" * 64) -> Champion:
    return Champion(f"v{number}", blob, base, "t:fp16", "eagle3", number, f"v{number - 1}", 1.5)


def fill(store: Store) -> None:
    """Until the server refuses."""
    for _ in range(1000):
        store.append_trace(bytes(100_000), max_bytes=ROOMY)


def ids_of(records: list[tuple[str, bytes]]) -> list[str]:
    return [id for id, _ in records]


@pytest.fixture
def restarted(redis_url: str) -> Callable[[], Store]:
    """Stores over the same keys, as a reader gets them when its process starts anew; 200 ms of silence is death."""
    prefix = f"test-{uuid4().hex}"
    return lambda: Store(redis_url, prefix, reclaim_idle_ms=200)


# Delivery


def test_a_record_arrives_once_and_in_order(store: Store) -> None:
    sent = [store.append_trace(bytes([n]), max_bytes=ROOMY) for n in range(5)]
    first = store.read_traces("a", count=3, block_ms=0)
    rest = store.read_traces("a", count=3, block_ms=0)
    assert ids_of(first + rest) == sent
    assert [data for _, data in first + rest] == [bytes([n]) for n in range(5)]
    assert store.read_traces("a", count=3, block_ms=0) == []


def test_two_consumers_share_the_records(store: Store) -> None:
    sent = [store.append_trace(b"x", max_bytes=ROOMY) for _ in range(4)]
    left, right = (store.read_traces(name, count=2, block_ms=0) for name in ("a", "b"))
    assert ids_of(left + right) == sent


def test_a_restarted_reader_gets_its_unacknowledged_records_before_new_ones(
    restarted: Callable[[], Store],
) -> None:
    store = restarted()
    sent = [store.append_trace(b"x", max_bytes=ROOMY) for _ in range(4)]
    store.read_traces("a", count=3, block_ms=0)
    store.acknowledge([sent[1]])
    again = restarted()
    assert ids_of(again.read_traces("a", count=9, block_ms=0)) == [sent[0], sent[2]]
    assert ids_of(again.read_traces("a", count=9, block_ms=0)) == [sent[3]]


def test_a_long_list_of_own_pending_records_comes_in_pages(restarted: Callable[[], Store]) -> None:
    store = restarted()
    sent = [store.append_trace(b"x", max_bytes=ROOMY) for _ in range(7)]
    store.read_traces("a", count=7, block_ms=0)
    again = restarted()
    pages = [ids_of(again.read_traces("a", count=3, block_ms=0)) for _ in range(4)]
    assert pages == [sent[:3], sent[3:6], sent[6:], []]


def test_what_a_dead_consumer_left_is_taken_over(restarted: Callable[[], Store]) -> None:
    store = restarted()
    sent = [store.append_trace(b"x", max_bytes=ROOMY) for _ in range(3)]
    store.read_traces("dead", count=2, block_ms=0)
    assert ids_of(store.read_traces("alive", count=9, block_ms=0)) == sent[2:]  # not idle for long enough
    time.sleep(0.25)
    reader = restarted()
    reader.acknowledge(ids_of(reader.read_traces("alive", count=9, block_ms=0)))  # its own come first
    assert ids_of(reader.read_traces("alive", count=9, block_ms=0)) == sent[:2]


def test_a_reader_that_is_slow_does_not_take_over_from_itself(restarted: Callable[[], Store]) -> None:
    store = restarted()
    store.append_trace(b"x", max_bytes=ROOMY)
    store.read_traces("a", count=1, block_ms=0)
    time.sleep(0.25)
    assert store.read_traces("a", count=1, block_ms=0) == []


def test_a_blocking_read_wakes_for_a_record(store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read_traces, "a", count=1, block_ms=10_000)
        time.sleep(0.2)
        sent = store.append_trace(b"x", max_bytes=ROOMY)
        assert ids_of(reading.result(timeout=5)) == [sent]  # half of what it would have waited


def test_a_blocking_read_gives_up(store: Store) -> None:
    before = time.monotonic()
    assert store.read_traces("a", count=1, block_ms=700) == []  # longer than one slice of waiting
    assert 0.7 <= time.monotonic() - before < 3


# Loss is counted


def test_depth_adds_up_while_records_come_and_go(store: Store) -> None:
    assert store.stream_depth() == StreamDepth(0, 0, 0, 0, 0)
    sent = [store.append_trace(b"x", max_bytes=ROOMY) for _ in range(5)]
    assert store.stream_depth() == StreamDepth(5, 0, 5, 0, 0)
    store.read_traces("a", count=2, block_ms=0)
    assert store.stream_depth() == StreamDepth(5, 2, 3, 0, 0)
    store.acknowledge(sent[:1])
    assert store.stream_depth() == StreamDepth(5, 1, 3, 0, 0)


def test_the_stream_keeps_to_its_byte_cap_and_counts_what_nobody_read(store: Store) -> None:
    for _ in range(40):
        store.append_trace(bytes(100_000), max_bytes=1_000_000)
    depth = store.stream_depth()
    assert depth.length == 9  # of 100 kB and some overhead each
    assert (depth.lag, depth.trimmed_unread) == (9, 31)


def test_the_cap_follows_records_that_grow(store: Store) -> None:
    for _ in range(300):
        store.append_trace(bytes(1_000), max_bytes=1_000_000)
    for _ in range(200):
        store.append_trace(bytes(100_000), max_bytes=1_000_000)
    assert store.stream_depth().length <= 11  # 10 fit; the mean forgets small records slowly


def test_records_read_before_they_were_trimmed_are_no_loss(store: Store) -> None:
    for _ in range(20):
        store.append_trace(bytes(100_000), max_bytes=500_000)
        store.acknowledge(ids_of(store.read_traces("a", count=9, block_ms=0)))
    assert store.stream_depth() == StreamDepth(4, 0, 0, 0, 0)


@pytest.mark.parametrize("reader", ["a", "b"])
def test_pending_records_whose_data_were_trimmed_are_given_up_and_counted(
    restarted: Callable[[], Store], reader: str
) -> None:
    store = restarted()
    for _ in range(4):
        store.append_trace(bytes(100_000), max_bytes=500_000)
    store.read_traces("a", count=4, block_ms=0)
    newest = [store.append_trace(bytes(100_000), max_bytes=500_000) for _ in range(4)]
    time.sleep(0.25)
    again = restarted()  # as the same consumer, or as one that takes over
    assert ids_of(again.read_traces(reader, count=9, block_ms=0)) == newest
    assert again.stream_depth() == StreamDepth(4, 4, 0, 4, 0)


def test_a_dead_letter_is_acknowledged_counted_and_capped(store: Store) -> None:
    for n in range(DEAD_KEEP + 3):
        store.append_trace(b"poison", max_bytes=ROOMY)
        [(id, data)] = store.read_traces("a", count=1, block_ms=0)
        store.dead_letter(id, data, f"reason {n}")
    depth = store.stream_depth()
    assert (depth.pending, depth.trimmed_unread, depth.dead) == (0, 0, DEAD_KEEP + 3)


# Champion and blobs


def test_there_is_no_champion_at_first(store: Store) -> None:
    assert store.champion() is None


def test_an_older_number_never_overwrites_a_newer_one(store: Store) -> None:
    assert store.set_champion(champion(2))
    assert not store.set_champion(champion(1))
    assert not store.set_champion(replace(champion(2), version="another"))
    assert store.set_champion(champion(2))  # saying the same again is no change
    assert store.champion() == champion(2)
    assert store.set_champion(champion(3))
    assert store.champion() == champion(3)


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "v9", "number": "nine"}',
        json.dumps(asdict(champion(9)) | {"number": "9"}),
        json.dumps(asdict(champion(9)) | {"number": 9.5}),
        json.dumps(asdict(champion(9)) | {"number": True}),
        json.dumps(asdict(champion(9)) | {"number": -1}),
        json.dumps(asdict(champion(9)) | {"target": None}),
        json.dumps(asdict(champion(9)) | {"created_at": "today"}),
        json.dumps(asdict(champion(9)) | {"more": 1}),
        "9",
        "null",
        "no JSON at all",
        "[]",
    ],
)
def test_a_pointer_that_somebody_wrote_by_hand_is_unreadable_and_can_be_replaced(store: Store, text: str) -> None:
    store._link.client.set(store._champion, text)
    with pytest.raises(Unreadable) as caught:
        store.champion()
    assert caught.value.text == text.encode()
    store.put_blob(b"pruning reads the pointer too")
    assert store.set_champion(champion(3), over=caught.value.text), "even when the other carries a higher number"
    assert store.champion() == champion(3)
    assert not store.set_champion(champion(2), over=caught.value.text), "only that very text is replaced"


def test_the_highest_number_wins_whoever_writes_last(redis_url: str) -> None:
    prefix = f"test-{uuid4().hex}"
    stores = [Store(redis_url, prefix) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: stores[n % 4].set_champion(champion(n)), [*range(1, 40, 2), *range(40, 0, -2)]))
    found = stores[0].champion()
    assert found is not None
    assert found.number == 40


def test_blobs_come_back_by_their_hash(store: Store) -> None:
    blob = os.urandom(300_000)
    assert store.get_blob(store.put_blob(blob)) == blob
    assert store.get_blob("0" * 64) is None


def test_old_blobs_go_but_not_those_that_pointers_name(store: Store) -> None:
    base, previous, current, forgotten = (store.put_blob(text) for text in (b"base", b"old", b"new", b"else"))
    store.set_champion(champion(1, blob=previous, base=base))
    store.set_champion(champion(2, blob=current, base=base))
    newer = [store.put_blob(bytes([n])) for n in range(BLOBS_KEPT)]
    assert store.get_blob(forgotten) is None
    assert all(store.get_blob(hash) is not None for hash in (base, previous, current, *newer))


def test_a_canary_is_shown_for_a_while_and_its_blob_is_kept_as_long(store: Store) -> None:
    assert store.canary() is None
    shown = Canary("r0", champion(3, blob=store.put_blob(b"canary")))
    store.set_canary(shown, ttl_s=60)
    for n in range(BLOBS_KEPT + 1):
        store.put_blob(bytes([n]))
    assert store.get_blob(shown.pointer.blob) == b"canary"
    assert store.canary() == shown
    assert store.champion() is None, "who does not know of canaries sees none"
    store.set_canary(None)
    assert store.canary() is None
    store.set_canary(shown, ttl_s=0.01)
    time.sleep(0.02)
    assert store.canary() is None


@pytest.mark.parametrize("text", ["no JSON", '{"replica": "r0"}', '{"replica": "r0", "pointer": {"number": 1}}', "7"])
def test_a_canary_that_somebody_wrote_by_hand_is_unreadable(store: Store, text: str) -> None:
    store._link.client.set(store._canary, text)
    with pytest.raises(Unreadable):
        store.canary()


# Counters and heartbeats


def test_counters_are_kept_by_replica_and_epoch(store: Store) -> None:
    store.put_counters("r0", "e1", {"steps": 3, "accepted|domain=a:b": 2})
    store.put_counters("r0", "e2", {"steps": 1})
    store.put_counters("r0", "e2", {"steps": 2})
    assert store.counters() == {
        ("r0", "e1"): {"steps": 3.0, "accepted|domain=a:b": 2.0},
        ("r0", "e2"): {"steps": 2.0},
    }


def test_a_heartbeat_vanishes_unless_renewed(store: Store) -> None:
    store.put_status("learner", {"state": "training", "gate": {"promoted": False}}, ttl_s=1)
    assert store.statuses() == {"learner": {"state": "training", "gate": {"promoted": False}}}
    time.sleep(1.2)
    assert store.statuses() == {}


# A full server, and outages


@dataclass
class Server:
    supervisor: Supervisor
    child: Child
    url: str

    def store(self) -> Store:
        return Store(self.url, "test")

    def kill(self) -> None:
        self.child.process.kill()
        self.child.process.wait()

    def restart(self) -> None:
        """Comes back empty: the server keeps nothing on disk."""
        self.supervisor.revive()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                self.store().ping()
                return
            except ServiceDown:
                time.sleep(0.05)
        raise AssertionError("the server did not come back")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of one test's own, of 32 MB, to be filled and killed."""
    with Supervisor(tmp_path) as supervisor:
        url = launch_server(supervisor, find_server(), maxmemory=32 * 2**20)
        yield Server(supervisor, supervisor.children[0], url)


def test_traces_that_fill_the_server_leave_room_for_the_champion(server: Server) -> None:
    store = server.store()
    kept = store.put_blob(b"adapter")
    store.set_champion(champion(1, blob=kept))
    with pytest.raises(ServiceDown, match=r"is full .*redis\.maxmemory"):
        fill(store)
    store.append_trace(bytes(100_000), max_bytes=ROOMY)  # half of the traces made room
    with pytest.raises(ServiceDown):
        fill(store)
    blob = os.urandom(8 * 2**20)
    hash = store.put_blob(blob)
    assert store.set_champion(champion(2, blob=hash))
    assert store.get_blob(hash) == blob
    assert store.get_blob(kept) == b"adapter"
    assert store.stream_depth().trimmed_unread > 0


def test_every_method_says_quickly_that_the_server_is_away(server: Server) -> None:
    store = server.store()
    store.append_trace(b"x", max_bytes=ROOMY)
    server.kill()
    calls: list[Callable[[], object]] = [
        store.ping,
        lambda: store.append_trace(b"x", max_bytes=ROOMY),
        lambda: store.read_traces("a", count=1, block_ms=60_000),
        lambda: store.acknowledge(["1-1"]),
        lambda: store.dead_letter("1-1", b"", "why"),
        store.stream_depth,
        lambda: store.put_blob(b"x"),
        lambda: store.get_blob("0"),
        lambda: store.set_champion(champion(1)),
        store.champion,
        lambda: store.put_counters("r", "e", {}),
        store.counters,
        lambda: store.put_status("s", {}, ttl_s=1),
        store.statuses,
        store.server_facts,
    ]
    for call in calls:
        before = time.monotonic()
        with pytest.raises(ServiceDown, match=r"Redis at 127\.0\.0\.1:\d+"):
            call()
        assert time.monotonic() - before < 2  # a refused connection is instant


def test_a_server_that_hangs_is_given_up(server: Server) -> None:
    store = server.store()
    store.ping()
    server.child.process.send_signal(signal.SIGSTOP)
    try:
        before = time.monotonic()
        with pytest.raises(ServiceDown):
            store.read_traces("a", count=1, block_ms=60_000)
        assert time.monotonic() - before < 5  # one timeout of 1.5 s, on a busy machine
    finally:
        server.child.process.send_signal(signal.SIGCONT)
    assert store.ping()


def test_everything_works_again_when_the_server_comes_back_empty(server: Server) -> None:
    writer, reader = server.store(), server.store()
    writer.set_champion(champion(7))
    writer.append_trace(b"lost", max_bytes=ROOMY)
    reader.read_traces("a", count=1, block_ms=0)
    server.kill()
    with pytest.raises(ServiceDown):
        reader.read_traces("a", count=1, block_ms=0)
    server.restart()
    assert reader.read_traces("a", count=1, block_ms=0) == []
    assert writer.champion() is None
    assert writer.set_champion(champion(3))  # what the learner republishes may carry any number
    sent = writer.append_trace(b"x", max_bytes=ROOMY)
    assert reader.read_traces("a", count=1, block_ms=0) == [(sent, b"x")]
    assert reader.stream_depth() == StreamDepth(1, 1, 0, 0, 0)
    writer.put_counters("r", "e", {"steps": 1})
    assert writer.counters() == {("r", "e"): {"steps": 1.0}}


def test_a_read_waiting_through_an_outage_fails_and_then_resumes(server: Server) -> None:
    store = server.store()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read_traces, "a", count=1, block_ms=60_000)
        time.sleep(0.3)
        server.kill()
        with pytest.raises(ServiceDown):
            reading.result(timeout=10)
    server.restart()
    sent = store.append_trace(b"x", max_bytes=ROOMY)
    assert ids_of(store.read_traces("a", count=1, block_ms=1000)) == [sent]


def test_a_url_that_cannot_be_read_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        Store("localhost:6379", "test")


def test_a_password_stays_out_of_messages() -> None:
    store = Store(f"redis://:secret@127.0.0.1:{free_port()}/0", "test")
    with pytest.raises(ServiceDown) as raised:
        store.ping()
    assert "secret" not in str(raised.value)


def test_a_moment_is_kept_once_and_dropped_when_asked(store: Store) -> None:
    assert (store.moments(), store.read_moments([])) == ([], [])
    for at in (10, 20, 30):
        store.keep_moment(at, {"at": at})
    store.keep_moment(20, {"at": "another's"}, drop=[10])
    assert sorted(store.moments()) == [20, 30]
    assert store.read_moments([10, 30, 20]) == [{"at": 30}, {"at": 20}]
