"""Traces through a real server: delivery, take-over, and loss that is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from shared.store import Store
from shared.stream import DEAD_KEEP, StreamDepth
from tests.shared.stores import ROOMY, ids_of


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
