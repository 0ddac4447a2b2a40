"""The store against a real server: protection of the champion, blobs, counters, heartbeats, a history."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from uuid import uuid4

import pytest

from shared.errors import Unreadable
from shared.store import BLOBS_KEPT, Canary, Store
from tests.shared.stores import champion

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


def test_a_moment_is_kept_once_and_dropped_when_asked(store: Store) -> None:
    assert (store.moments(), store.read_moments([])) == ([], [])
    for at in (10, 20, 30):
        store.keep_moment(at, {"at": at})
    store.keep_moment(20, {"at": "another's"}, drop=[10])
    assert sorted(store.moments()) == [20, 30]
    assert store.read_moments([10, 30, 20]) == [{"at": 30}, {"at": 20}]
