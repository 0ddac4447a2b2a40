"""The wire format gives back exactly what went in, and calls everything else a TraceError, whatever it is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import TraceError
from shared.trace import SCHEMA_VERSION, Kind, Round, Sampling, TraceRecord, decode, encode


def record(n: int = 5, *, topk: int = 3, prompt: int = 4, seed: int = 0) -> TraceRecord:
    """A record of `n` committed tokens with every part in use."""
    rng = np.random.default_rng(seed)
    positions = np.arange(0, n, 2, dtype=np.int32)
    rejected = [(position, 7) for position in range(1, n, 2)]
    return TraceRecord(
        id=f"r-{seed}",
        tenant="t",
        domain="sql",
        target="abc:fp16",
        replica="replica-1",
        finished_at=1.5e9 + seed,
        sampling=Sampling(0.7, 40, 0.9, 0.05, True, 0.5, -1.5, 1.25, ((3, -100.0), (9, 2.5)), True),
        prompt_ids=rng.integers(0, 50_000, prompt).astype(np.int32),
        output_ids=rng.integers(0, 50_000, n).astype(np.int32),
        kinds=np.array([Kind.PLAIN] + [Kind.RECOVERED] * (n - 1) if n else [], dtype=np.uint8),
        probs=rng.random(n, dtype=np.float32),
        rounds=(Round(0, "", (), 0, 0), *(Round(t, "v1", (7, 8), 0, 1) for t in range(1, n))),
        topk_positions=positions,
        topk_ids=rng.integers(0, 50_000, (len(positions), topk)).astype(np.int32),
        topk_logprobs=(-rng.random((len(positions), topk))).astype(np.float16),
        topk_lse=rng.random(len(positions), dtype=np.float32),
        rejected=np.array(rejected, dtype=np.int32).reshape(-1, 2),
        rejected_probs=rng.random(len(rejected), dtype=np.float32),
        has_features=True,
    )


def assert_equal(left: TraceRecord, right: TraceRecord) -> None:
    for field in fields(TraceRecord):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("n", [0, 1, 5, 400])
def test_round_trip(n: int) -> None:
    original = record(n)
    assert_equal(decode(encode(original)), original)


def test_round_trip_without_any_optional_part() -> None:
    bare = replace(
        record(3),
        rounds=(),
        topk_positions=np.zeros(0, np.int32),
        topk_ids=np.zeros((0, 0), np.int32),
        topk_logprobs=np.zeros((0, 0), np.float16),
        topk_lse=np.zeros(0, np.float32),
        rejected=np.zeros((0, 2), np.int32),
        rejected_probs=np.zeros(0, np.float32),
    )
    assert_equal(decode(encode(bare)), bare)


def test_what_was_decoded_can_be_written_to() -> None:
    """A learner may scale in place; it must not find a read-only view of the wire."""
    again = decode(encode(record()))
    again.probs[0] = 0.5
    again.topk_ids[0, 0] = 1


def test_versions_are_listed_once_in_order_of_use() -> None:
    rounds = tuple(Round(i, version, (1,), 0, 1) for i, version in enumerate(["v1", "v1", "v2", "v1"]))
    assert replace(record(), rounds=rounds).versions == ("v1", "v2")


# --- what is not a record --------------------------------------------------------------------------------------

WHOLE = encode(record())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_a_trace_error(data: bytes) -> None:
    with pytest.raises(TraceError):
        decode(data)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_decode_or_are_a_trace_error(changes: list[tuple[int, int]]) -> None:
    spoilt = bytearray(WHOLE)
    for place, value in changes:
        spoilt[place] = value
    expect_record_or_trace_error(bytes(spoilt))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=10))
def test_a_torn_record_is_a_trace_error(length: int, tail: bytes) -> None:
    with pytest.raises(TraceError):
        decode(WHOLE[:length])
    if tail:
        with pytest.raises(TraceError):
            decode(WHOLE + tail)


def expect_record_or_trace_error(data: bytes) -> None:
    """Never another exception; and whatever decodes has arrays that fit each other and can be encoded again."""
    try:
        found = decode(data)
    except TraceError:
        return
    n = len(found.output_ids)
    assert len(found.kinds) == len(found.probs) == n
    assert all(Kind(kind) for kind in found.kinds if kind)
    assert all(0 <= position < n for position, _ in found.rejected)
    assert all(0 <= r.accepted <= r.tested <= len(r.drafted) and 0 <= r.start <= n for r in found.rounds)
    encode(found)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.just(msgpack.ExtType(5, b"x")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted(msgpack.unpackb(WHOLE))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(KEYS), values)
def test_any_value_in_any_field_decodes_or_is_a_trace_error(key: str, value: Any) -> None:
    expect_record_or_trace_error(msgpack.packb({**msgpack.unpackb(WHOLE), key: value}))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([key for key in KEYS if isinstance(msgpack.unpackb(WHOLE)[key], list)]),
    st.lists(st.integers(-3, 2**64 - 1), max_size=3),
    st.binary(max_size=40),
)
def test_any_shape_and_bytes_of_an_array_decode_or_are_a_trace_error(key: str, shape: list[int], data: bytes) -> None:
    expect_record_or_trace_error(msgpack.packb({**msgpack.unpackb(WHOLE), key: [shape, data]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": SCHEMA_VERSION + 1}, f"schema {SCHEMA_VERSION + 1}"),
        ({"schema": None}, "schema None"),
        ({"surprise": 1}, r"unknown \['surprise'\]"),
        ({b"raw": 1}, "unknown"),
        ({"id": 7}, "id is int, not str"),
        ({"has_features": 1}, "has_features is int, not bool"),
        ({"finished_at": "now"}, "finished_at is str, not float"),
        ({"kinds": [[5], bytes([0, 1, 2, 3, 9])]}, "kinds"),
        ({"probs": [[4], bytes(16)]}, r"probs has shape \(4,\), not \(5,\)"),
        ({"topk_positions": [[], bytes(4)]}, "topk_positions"),
        ({"topk_positions": [[3], np.array([0, 2, 5], "<i4").tobytes()]}, "topk_positions"),
        ({"topk_positions": [[3], np.array([2, 0, 4], "<i4").tobytes()]}, "ascend"),
        ({"rejected": [[2, 2], np.array([1, 7, 5, 7], "<i4").tobytes()]}, "rejected"),
        ({"rounds": [[0, "v", [1], 2, 2]]}, "round"),
        ({"rounds": [[0, "v", [1, 2], 1, 0]]}, "round"),
        ({"rounds": [[9, "v", [], 0, 0]]}, "round"),
        ({"rounds": [[0, "v", [1], float("inf"), 0]]}, "unreadable"),
        ({"rounds": [[0, 5, [1], 0, 0]]}, "version is int"),
        ({"rounds": 5}, "unreadable"),
        ({"sampling": ["hot", 0, 1.0, 0.0, False]}, "sampling"),
        ({"sampling": [1.0, 0, 1.0]}, "sampling"),
        ({"sampling": [1.0, 0, 1.0, 0.0, False, 0.0, 0.0, 0.0, [], False]}, "out of range"),
        ({"sampling": [1.0, 0, 1.0, 0.0, False, float("nan"), 0.0, 1.0, [], False]}, "out of range"),
        ({"sampling": [1.0, 0, 1.0, 0.0, False, 0.0, 0.0, 1.0, [[-1, 2.0]], False]}, "out of range"),
        ({"sampling": [1.0, 0, 1.0, 0.0, False, 0.0, 0.0, 1.0, [[1]], False]}, "unreadable"),
        ({"output_ids": [[2**63], b""]}, "unreadable"),
        ({"prompt_ids": [[2, 2], bytes(16)]}, "prompt_ids"),
    ],
)
def test_each_defect_is_named(change: dict[Any, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        decode(msgpack.packb({**msgpack.unpackb(WHOLE), **change}))


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(key: str) -> None:
    body = msgpack.unpackb(WHOLE)
    del body[key]
    with pytest.raises(TraceError, match="schema None" if key == "schema" else f"missing .'{key}'"):
        decode(msgpack.packb(body))
