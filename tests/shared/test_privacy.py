"""A tenant's policy: which requests are traced, for how long, and that the file that says so is read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.keys import Keyring, WatchedKeys, changed_keys, read_keys
from shared.privacy import Policy, hash_share
from shared.store import Store
from shared.stream import SWEEP_PAGE

ROOMY = 2**26


def set_policy(path: Path, tenant: str, policy: Policy | None) -> None:
    with changed_keys(path) as held:
        held[0] = held[0].with_policy(tenant, policy)


def test_the_share_is_met_and_each_request_always_gets_the_same_answer() -> None:
    ids = [f"chatcmpl-{number:032x}-0" for number in range(4000)]
    taken = [Policy(share=0.25).takes(id) for id in ids]
    # Four standard deviations of 4,000 draws at a quarter: 4 * sqrt(4000 * 0.25 * 0.75).
    assert abs(sum(taken) - 1000) < 110
    assert taken == [Policy(share=0.25).takes(id) for id in ids]
    assert all(Policy().takes(id) for id in ids)
    assert not any(Policy(share=0.0).takes(id) for id in ids)
    assert not any(Policy(traces=False).takes(id) for id in ids)
    assert all(0 <= hash_share(id) < 1 for id in ids)


def test_no_limit_is_no_time_of_expiry() -> None:
    assert Policy().expires_at(1000.0) == 0
    assert Policy(keep_s=60).expires_at(1000.0) == 1060


def test_a_policy_counts_without_a_restart_and_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    set_policy(path, "acme", Policy(traces=False))
    watched = WatchedKeys(path)
    assert watched.policy("acme") == Policy(traces=False)
    assert watched.policy("other") is None
    set_policy(path, "acme", Policy(share=0.5, keep_s=10))
    assert watched.policy("acme") == Policy(share=0.5, keep_s=10)
    path.write_text("torn")
    assert watched.policy("acme") == Policy(share=0.5, keep_s=10)
    path.unlink()
    assert watched.policy("acme") == Policy(share=0.5, keep_s=10), "or an opt-out would end with the file"
    set_policy(path, "acme", None)
    assert watched.policy("acme") is None


def test_a_file_of_before_there_were_policies_has_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    set_policy(path, "acme", Policy())
    tree = json.loads(path.read_text())
    del tree["tenants"]
    path.write_text(json.dumps(tree))
    assert read_keys(path).policies == {}


@pytest.mark.parametrize(
    "policy",
    [
        {"traces": False},
        {"traces": 1, "share": 1.0, "keep_s": 0.0},
        {"traces": True, "share": 1.5, "keep_s": 0.0},
        {"traces": True, "share": 1.0, "keep_s": -1.0},
        {"traces": True, "share": 1.0, "keep_s": 0.0, "more": 1},
        "off",
    ],
)
def test_a_policy_that_makes_no_sense_is_an_error_that_names_the_file(tmp_path: Path, policy: Any) -> None:
    path = tmp_path / "keys.json"
    set_policy(path, "acme", Policy())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tenants": {"acme": policy}}))
    with pytest.raises(ConfigError, match=r"serve\.keys_file.*keys\.json"):
        read_keys(path)
    with pytest.raises(ConfigError, match="TENANT"):
        Keyring().with_policy("two words", Policy())


def test_what_has_expired_leaves_the_stream_read_or_not(store: Store) -> None:
    for number in range(SWEEP_PAGE + 6):  # more than one page
        store.append_trace(b"x", max_bytes=ROOMY, tenant="acme", expires_at=100.0 if number % 2 else 0.0)
    store.append_trace(b"later", max_bytes=ROOMY, tenant="acme", expires_at=300.0)
    read = store.read_traces("a", count=10, block_ms=0)
    assert len(read) == 10
    expired = (SWEEP_PAGE + 6) // 2
    assert store.sweep_traces(200.0) == (expired, expired - 5), "five of the ten that were read had expired"
    depth = store.stream_depth()
    assert depth.length == SWEEP_PAGE + 6 - expired + 1
    assert (depth.pending, depth.lag, depth.trimmed_unread) == (5, depth.length - 5, 0)
    while more := store.read_traces("a", count=50, block_ms=0):
        read += more
    assert store.sweep_traces(200.0) == (0, 0)


def test_a_tenants_records_leave_the_stream_and_the_dead_letters_and_nobody_elses(store: Store) -> None:
    for tenant in ("acme", "other", "acme", "other"):
        store.append_trace(tenant.encode(), max_bytes=ROOMY, tenant=tenant)
    for id, data in store.read_traces("a", count=2, block_ms=0):
        store.dead_letter(id, data, "a drill")
    assert store.sweep_traces(0.0, "acme") == (3, 1), "two records of the stream, one unread, and a letter"
    assert [data for _, data in store.peek_traces("", count=9)] == [b"other", b"other"]
    assert [data for _, data in store.read_traces("a", count=9, block_ms=0)] == [b"other"]
    assert store.stream_depth().trimmed_unread == 0
    assert store.sweep_traces(0.0, "acme") == (0, 0)
