"""From the stream to the buffer: what is good arrives measured, what is poison is buried, and nobody is held up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from learner.bank import DrafterBank
from learner.base import Base, load_base
from learner.buffer import Buffer, Measured, read_measurements
from learner.consumer import BACKLOG, EXPIRE_S, FEATURE_WAIT_S, WAITING, Consumer
from learner.database import Database
from learner.features import FeatureInbox, FrozenTarget
from learner.measure import Measurer
from shared.errors import ServiceDown
from shared.store import Store
from shared.trace import Sampling, TraceRecord, encode
from tests.learner.traffic import GAMMA, Served, TinyServing

MOST = 2**26


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def served(serving: TinyServing) -> list[Served]:
    return list(serving.serve(40))


@pytest.fixture(scope="module")
def base(serving: TinyServing) -> Base:
    found = load_base(serving.config)
    assert found is not None
    return found


class Bench:
    """A consumer with everything that it needs, over a real Redis."""

    def __init__(self, serving: TinyServing, base: Base, store: Store, path: Path, *, recompute_all: bool) -> None:
        self.database = Database(path / "buffer.sqlite")
        self.buffer = Buffer(self.database, recent=1000, reservoir=0)
        self.inbox, self.clock, self.store = FeatureInbox(10**6), Clock(), store
        self.measured: list[tuple[str, Measured]] = []
        bank = DrafterBank(base, lambda version: None)
        self.consumer = Consumer(
            store=store,
            buffer=self.buffer,
            measurer=Measurer(base, bank, gamma=GAMMA, champion=lambda: "base"),
            base=base,
            inbox=self.inbox,
            frozen=FrozenTarget(serving.config, base.feature_layers),
            recompute_all=recompute_all,
            listener=lambda domain, measured: self.measured.append((domain, measured)),
            clock=self.clock,
        )

    def send(self, record: TraceRecord) -> str:
        return self.store.append_trace(encode(record), max_bytes=MOST)

    def count(self, name: str) -> float:
        return self.consumer.counters.total(name)


@pytest.fixture
def bench(serving: TinyServing, base: Base, store: Store, tmp_path: Path) -> Iterator[Bench]:
    found = Bench(serving, base, store, tmp_path, recompute_all=False)
    yield found
    found.database.close()


def test_traffic_is_measured_stored_and_acknowledged(bench: Bench, served: list[Served]) -> None:
    for item in served:
        bench.inbox.put(item.record.id, item.features)
        bench.send(item.record)
    while bench.consumer.step(0):
        pass
    assert bench.buffer.newest() == len(served)
    depth = bench.store.stream_depth()
    assert (depth.pending, depth.lag, depth.dead) == (0, 0, 0)
    assert [measured.positions for _, measured in bench.measured] == [len(s.record.output_ids) - 1 for s in served]
    stored = bench.buffer.load(1)
    assert stored.features is not None
    assert np.array_equal(stored.features.numpy(), served[0].features)
    assert bench.inbox.rows == 0


def test_the_estimate_agrees_with_what_serving_counted(bench: Bench, served: list[Served]) -> None:
    for item in served:
        bench.inbox.put(item.record.id, item.features)
        bench.send(item.record)
    while bench.consumer.step(0):
        pass
    rows = read_measurements(bench.database.path, 0)
    expected = np.array([(row["live_expected_accepted"], row["live_expected_tested"]) for row in rows]).sum(0)
    counted = np.array([(row["accepted"], row["tested"]) for row in rows], dtype=float)
    alpha = counted.sum(0)[0] / counted.sum(0)[1]
    # Four standard errors of the counted ratio, by request.
    residual = counted[:, 0] - alpha * counted[:, 1]
    error = 4 * (residual @ residual) ** 0.5 / counted.sum(0)[1]
    assert abs(expected[0] / expected[1] - alpha) < error
    assert all(row["live_sum"] == row["static_sum"] for row in rows), "the base served"


def poison(record: TraceRecord) -> dict[str, bytes]:
    """Every way in which a record can be none: by its bytes, its shape, its content, its target."""

    def without(key: str) -> bytes:
        body: dict[str, Any] = msgpack.unpackb(encode(record), raw=False)
        del body[key]
        return bytes(msgpack.packb(body, use_bin_type=True))

    def of(**changes: Any) -> bytes:
        return encode(replace(record, **changes))

    whole, ids = encode(record), record.output_ids
    return {
        "nothing": b"",
        "noise": bytes(range(256)) * 4,
        "a number": msgpack.packb(7),
        "cut off": whole[: len(whole) // 2],
        "no rounds": without("rounds"),
        "another schema": whole.replace(b"schema\x03", b"schema\x09"),
        "another target": of(target="0" * 64 + ":fp32"),
        "an unknown token": of(output_ids=np.where(np.arange(len(ids)) == 3, 10**6, ids)),
        "a negative token": of(prompt_ids=-record.prompt_ids - 1),
        "no output": of(
            output_ids=ids[:0],
            kinds=record.kinds[:0],
            probs=record.probs[:0],
            topk_positions=record.topk_positions[:0],
            topk_ids=record.topk_ids[:0],
            topk_logprobs=record.topk_logprobs[:0],
            topk_lse=record.topk_lse[:0],
        ),
        "no probability": of(probs=np.full_like(record.probs, np.nan)),
        "an impossible top-k": of(topk_logprobs=np.full_like(record.topk_logprobs, 5.0)),
        "an endless life": of(expires_at=float("inf")),
        "positions in disorder": of(topk_positions=record.topk_positions[::-1]),
        "an impossible temperature": of(sampling=Sampling(temperature=float("nan"))),
        "words for numbers": of(sampling=Sampling(top_k="many")),  # type: ignore[arg-type]
    }


def test_poison_is_buried_and_counted_and_holds_up_nobody(bench: Bench, served: list[Served]) -> None:
    bad = poison(served[0].record)
    for name, data in bad.items():
        assert data != served[0].data, name
        bench.store.append_trace(data, max_bytes=MOST)
    for item in served[1:4]:
        bench.inbox.put(item.record.id, item.features)
        bench.send(item.record)
    for _ in range(4):
        bench.consumer.step(0)
    assert bench.buffer.newest() == 3
    depth = bench.store.stream_depth()
    assert (depth.dead, depth.pending, depth.lag) == (len(bad), 0, 0)
    assert bench.count("traces_dead") == len(bad)


def test_what_breaks_the_judging_is_buried_alone(bench: Bench, served: list[Served], base: Base) -> None:
    for item in served[:5]:
        bench.inbox.put(item.record.id, item.features)
        bench.send(item.record)
    measure = bench.consumer.measurer.measure

    def fragile(examples: Any) -> list[Measured]:
        if any(example.record.id == served[2].record.id for example in examples):
            raise RuntimeError("a shape that nobody thought of")
        return measure(examples)

    bench.consumer.measurer.measure = fragile  # type: ignore[method-assign]
    bench.consumer.step(0)
    assert bench.buffer.newest() == 4
    assert bench.store.stream_depth().dead == 1
    assert bench.store.stream_depth().pending == 0


def test_a_trace_waits_for_its_features_and_lets_others_pass(bench: Bench, served: list[Served]) -> None:
    late, early = served[:2]
    bench.send(late.record)
    bench.inbox.put(early.record.id, early.features)
    bench.send(early.record)
    assert bench.consumer.step(0) == 1
    assert bench.consumer.waiting == 1
    assert bench.store.stream_depth().pending == 1, "what waits is not acknowledged"
    bench.inbox.put(late.record.id, late.features)
    assert bench.consumer.step(0) == 1
    assert bench.store.stream_depth().pending == 0
    assert bench.count("features_recomputed") == 0


def test_lost_features_are_computed_again_as_the_replica_had_them(bench: Bench, served: list[Served]) -> None:
    bench.send(served[0].record)
    bench.consumer.step(0)
    bench.clock.now = FEATURE_WAIT_S
    assert bench.consumer.step(0) == 1
    assert bench.count("features_recomputed") == 1
    found = bench.buffer.load(1).features
    assert found is not None
    np.testing.assert_allclose(found.numpy(), served[0].features, atol=2e-2)


def test_features_of_another_request_are_not_taken(bench: Bench, served: list[Served]) -> None:
    bench.send(served[0].record)
    bench.inbox.put(served[0].record.id, served[0].features[:-1])
    bench.consumer.step(0)
    assert bench.count("features_misfit") == 1
    bench.clock.now = FEATURE_WAIT_S
    bench.consumer.step(0)
    found = bench.buffer.load(1).features
    assert found is not None
    assert found.shape == served[0].features.shape


def test_a_backlog_is_not_made_worse_by_computing(bench: Bench, served: list[Served]) -> None:
    for item in served[: BACKLOG + 4]:
        bench.send(item.record)
    bench.consumer.step(0)
    bench.consumer.step(0)
    assert bench.consumer.waiting == BACKLOG + 4
    bench.clock.now = FEATURE_WAIT_S
    bench.consumer.step(0)
    assert bench.count("features_recomputed") == 0
    assert bench.count("traces_unmeasured") == BACKLOG + 4
    assert bench.store.stream_depth().pending == 0


def test_what_waits_is_bounded_and_the_rest_stays_in_the_stream(bench: Bench, served: list[Served]) -> None:
    for number in range(WAITING + 6):
        bench.send(replace(served[0].record, id=f"copy-{number}"))
    for _ in range(10):
        bench.consumer.step(0)
    assert bench.consumer.waiting == WAITING
    assert bench.store.stream_depth().lag == 6


@pytest.mark.parametrize("everything", [False, True])
def test_a_record_that_never_had_features_is_computed_only_if_nobody_sends_any(
    serving: TinyServing, base: Base, store: Store, tmp_path: Path, served: list[Served], everything: bool
) -> None:
    bench = Bench(serving, base, store, tmp_path, recompute_all=everything)
    bench.send(replace(served[0].record, has_features=False))
    assert bench.consumer.step(0) == 1
    assert bench.count("features_recomputed") == everything
    assert len(read_measurements(bench.database.path, 0)) == everything
    bench.database.close()


def test_what_has_expired_is_forgotten_unread_and_goes_from_the_buffer_and_the_stream(
    bench: Bench, served: list[Served]
) -> None:
    day = 86400.0
    for number, item in enumerate(served[:8]):
        bench.inbox.put(item.record.id, item.features)
        life = (-day, day, 2 * day, None)[number % 4]
        record = replace(item.record, expires_at=item.record.finished_at + life if life else 0.0)
        bench.store.append_trace(
            encode(record), max_bytes=MOST, expires_at=0.0 if number % 4 == 0 else record.expires_at
        )
    while bench.consumer.step(0):
        pass
    assert bench.count("traces_expired") == 2
    assert bench.count("traces_stored") == 6
    assert bench.inbox.rows == 0, "the features of what had expired are forgotten too"
    assert bench.store.stream_depth().pending == 0
    bench.consumer.now = lambda: served[0].record.finished_at + 1.5 * day
    bench.clock.now += EXPIRE_S
    with bench.buffer.pinned([1]):
        bench.consumer.step(0)
        assert bench.count("traces_expired_in_buffer") == 1, "what an attempt is using stays until its end"
    bench.clock.now += EXPIRE_S
    bench.consumer.step(0)
    assert bench.count("traces_expired_in_buffer") == 2
    assert sum(sum(roles.values()) for roles in bench.buffer.counts().values()) == 4
    assert bench.buffer.newest() == 6, "the ledger keeps the sums"
    assert bench.store.stream_depth().length == 6, "two more have left the stream"


def test_a_second_delivery_is_recognised(
    serving: TinyServing,
    base: Base,
    redis_url: str,
    tmp_path: Path,
    served: list[Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, restarted = (Store(redis_url, f"test-{tmp_path.name}") for _ in range(2))
    bench = Bench(serving, base, first, tmp_path, recompute_all=False)
    bench.inbox.put(served[0].record.id, served[0].features)
    bench.send(served[0].record)
    with monkeypatch.context() as patch:
        patch.setattr(first, "acknowledge", _away)
        with pytest.raises(ServiceDown):
            bench.consumer.step(0)
    assert bench.buffer.newest() == 1
    bench.consumer.store = restarted
    bench.consumer.step(0)
    assert bench.count("traces_again") == 1
    assert bench.buffer.newest() == 1
    assert first.stream_depth().pending == 0
    bench.database.close()
    first.close()
    restarted.close()


def _away(ids: object) -> None:
    raise ServiceDown("on purpose")
