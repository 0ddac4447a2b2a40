"""The store where its server is full, hangs, dies or comes back empty."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.local_redis import find_server, launch_server
from ops.ports import free_port
from ops.processes import Child, Supervisor
from shared.errors import ConfigError, ServiceDown
from shared.store import Store
from shared.stream import StreamDepth
from tests.shared.stores import ROOMY, champion, fill, ids_of


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
