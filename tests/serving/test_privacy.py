"""Nothing of a tenant leaves the replica that its policy does not let out, at whatever moment the policy changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serving.engine.engine import Tracing
from serving.privacy import Privacy
from serving.publisher import TracePublisher
from shared.config import config_from_flat
from shared.errors import ServiceDown
from shared.keys import WatchedKeys, changed_keys
from shared.privacy import Policy
from shared.store import Store
from shared.trace import TraceRecord, decode
from tests.learner.records import random_record
from tests.tiny_engine import Bench, GammaByDomain, request, serve

FEATURES = torch.zeros(15, 4).half()


class Sink:
    """Takes features and remembers whose."""

    dropped = 0

    def __init__(self) -> None:
        self.ids: list[str] = []

    def offer(self, id: str, features: torch.Tensor) -> bool:
        self.ids.append(id)
        return True

    def stop(self) -> None:
        """Nothing runs."""


def record_of(tenant: str, number: int = 1) -> TraceRecord:
    return replace(random_record(number), id=f"{tenant}-{number}", tenant=tenant, finished_at=1000.0)


def set_policy(path: Path, tenant: str, policy: Policy) -> None:
    with changed_keys(path) as held:
        held[0] = held[0].with_policy(tenant, policy)


def publisher_of(store: Store, privacy: Privacy, sink: Sink) -> TracePublisher:
    return TracePublisher(
        store,
        "replica",
        queue_size=64,
        stream_bytes=2**24,
        features=sink,
        privacy=privacy,
        counters=dict,
        status=dict,
    )


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys.json"
    set_policy(found, "closed", Policy(traces=False))
    set_policy(found, "brief", Policy(keep_s=60.0))
    return found


def test_an_opted_out_tenant_leaves_no_trace_and_no_features(store: Store, path: Path) -> None:
    sink = Sink()
    publisher = publisher_of(store, Privacy(Policy(), WatchedKeys(path)), sink)
    for tenant in ("closed", "brief", "other"):
        publisher.offer(record_of(tenant), FEATURES)
    until(lambda: publisher.published == 2)
    publisher.stop()
    sent = [decode(data) for _, data in store.peek_traces("", count=9)]
    assert {record.tenant: record.expires_at for record in sent} == {"brief": 1060.0, "other": 0.0}
    assert sink.ids == ["brief-1", "other-1"]
    assert publisher.totals()["traces_withheld"] == 1


def test_who_opts_out_while_traces_wait_for_redis_is_heard(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(store, Privacy(Policy(), WatchedKeys(path)), Sink())
    tried: list[object] = []

    def away(*given: object, **settings: object) -> str:
        tried.append(given)
        raise ServiceDown("a drill")

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_trace", away)
        for number in range(3):
            publisher.offer(record_of("brief", number), None)
        until(lambda: tried)
        set_policy(path, "brief", Policy(traces=False))
    until(lambda: publisher.totals()["traces_withheld"] == 3)
    publisher.stop()
    assert store.peek_traces("", count=9) == []


def test_without_a_policy_of_its_own_a_tenant_has_the_configurations(tmp_path: Path) -> None:
    config = config_from_flat({"home": str(tmp_path), "privacy.traces": False})
    assert Privacy.of(config).policy("anybody") == Policy(traces=False)
    set_policy(config.keys_path, "open", Policy(share=0.5))
    assert Privacy.of(config).policy("open") == Policy(share=0.5)
    assert Privacy.of(config).policy("anybody") == Policy(traces=False)


def test_a_request_that_is_not_traced_is_answered_the_same_beside_one_that_is(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bench = Bench(tmp_path_factory.mktemp("bench"), vocab=64)
    asked = [
        replace(request(f"{tenant}-{n}", [5, 6, 7 + n], domain="g2"), tenant=tenant)
        for tenant in "ab"
        for n in range(2)
    ]
    privacy, records = Privacy(Policy()), list[TraceRecord]()

    def answers(wants: Callable[[object], bool]) -> dict[str, list[int]]:
        records.clear()
        tracing = Tracing(
            lambda record, _: records.append(record), "replica", 4, 1.0, lambda _: False, wants_trace=wants
        )
        target = bench.target()
        found, _ = serve(target, bench.drafter("model", target), asked, GammaByDomain(), tracing=tracing)
        return {id: list(answer.token_ids) for id, answer in found.items()}

    everything = answers(privacy.wants_trace)
    assert len(records) == 4
    assert privacy.withheld == 0
    assert answers(lambda r: r.tenant == "b") == everything  # type: ignore[attr-defined]
    assert {record.tenant for record in records} == {"b"}
    assert answers(lambda _: False) == everything
    assert records == []
