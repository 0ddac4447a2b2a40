"""A replica follows the champion pointer, and refuses whatever does not belong on it without ceasing to serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serving.engine.events import Delta
from serving.engine.request import GenerationParams, GenerationRequest
from serving.replica import Replica
from shared.artifact import Artifact, Manifest, pack_blob, save_folder
from shared.config import Config, load_config
from shared.errors import ServiceDown
from shared.metrics import SERVING_METRICS, serving_samples, unknown_fields
from shared.models.eagle3 import Eagle3Config, Eagle3Head
from shared.models.target import load_model
from shared.store import Canary, Champion, Store
from shared.trace import Sampling, decode
from tests.tiny import build_tiny_model

RANK = 2


def _head_folder(folder: Path, target: Path, home: Path) -> Path:
    loaded = load_model(str(target), home=home, weights="fp32")
    embedding = loaded.model.get_input_embeddings().weight
    torch.manual_seed(3)
    config = Eagle3Config(
        target_hidden=32,
        feature_layers=(0, 1),
        hidden=32,
        intermediate=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        draft_vocab=30,
        max_positions=512,
    )
    manifest = Manifest("base", "eagle3", "full", target=loaded.fingerprint, config=config.to_dict())
    save_folder(Artifact(manifest, Eagle3Head(config, embedding).state_dict()), folder)
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Config:
    root = tmp_path_factory.mktemp("replica")
    target = build_tiny_model(root / "target", vocab=48)
    head = _head_folder(root / "head", target, root)
    return load_config(
        environ={},
        overrides={
            "home": str(root),
            "target.model": str(target),
            "drafter.model": str(head),
            "drafter.gamma": 3,
            "drafter.swap_poll_s": 0.02,
            "engine.kv_tokens": 2048,
            "engine.threads": 1,
            "redis.url": redis_url,
        },
    )


@pytest.fixture
def replica(config: Config, store: Store, request: pytest.FixtureRequest) -> Iterator[Replica]:
    prefix = store._champion.removesuffix(":champion")
    replica = Replica(replace(config, redis=replace(config.redis, prefix=prefix)), "replica-1")
    replica.start()
    yield replica
    replica.stop()


def adapter(replica: Replica, *, version: str = "v1", spread: float = 0.5, **changes: object) -> Artifact:
    slot = replica._slot
    assert slot is not None
    noise = torch.Generator().manual_seed(5)
    tensors = {
        "lm_head.lora_A": torch.randn((RANK, 32), generator=noise) * spread,
        "lm_head.lora_B": torch.randn((30, RANK), generator=noise) * spread,
    }
    settings = {"rank": RANK, "lora_alpha": 4}
    manifest = Manifest(version, "eagle3", "lora", target=slot.target, base=slot.base, config=settings)
    return Artifact(replace(manifest, **changes), tensors)  # type: ignore[arg-type]


def publish(store: Store, artifact: Artifact, number: int, **changes: object) -> None:
    manifest = artifact.manifest
    pointer = Champion(
        version=manifest.version,
        blob=store.put_blob(pack_blob(artifact)),
        base=manifest.base,
        target=manifest.target,
        kind=manifest.kind,
        number=number,
        previous="base",
        created_at=0.0,
    )
    store.set_champion(replace(pointer, **changes))  # type: ignore[arg-type]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def answer(replica: Replica, name: str, *, tokens: int = 40, during: Callable[[], None] | None = None) -> list[int]:
    params = GenerationParams(sampling=Sampling(temperature=0.0), max_tokens=tokens, ignore_eos=True)

    async def run() -> list[int]:
        found: list[int] = []
        async for event in replica.loop.generate(GenerationRequest(name, (5, 6, 7, 8), params, domain="chat")):
            if isinstance(event, Delta):
                found.extend(event.token_ids)
            if during is not None and len(found) == len(event.token_ids if isinstance(event, Delta) else ()):
                await asyncio.to_thread(during)
        return found

    return asyncio.run(run())


def test_a_champion_is_swapped_in_while_a_request_runs_and_changes_no_greedy_answer(
    replica: Replica, store: Store
) -> None:
    before = answer(replica, "before")
    during = answer(replica, "during", during=lambda: publish(store, adapter(replica), 1))
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "v1")
    assert during == before
    assert answer(replica, "after") == before
    totals = replica.publisher.totals()  # type: ignore[union-attr]
    assert totals["swaps"] == 1
    assert totals["swap_pause_s"] < 1.0  # an assignment, not a packing
    assert sum(value for name, value in totals.items() if name.startswith("swap_pause_le.")) == 1
    assert unknown_fields(replica.counters()) == set(), "whatever is counted is exported"
    assert {sample.metric for sample in serving_samples(replica.counters(), replica.status())} <= set(SERVING_METRICS)


def test_the_champion_that_stands_at_start_serves_from_the_first_request(
    config: Config, replica: Replica, store: Store
) -> None:
    publish(store, adapter(replica), 1)
    prefix = store._champion.removesuffix(":champion")
    second = Replica(replace(config, redis=replace(config.redis, prefix=prefix)), "replica-2")
    second.start()
    try:
        assert eventually(lambda: second.loop.snapshot().drafter_version == "v1")
    finally:
        second.stop()


@pytest.fixture
def pair(config: Config, replica: Replica, store: Store) -> Iterator[tuple[Replica, Replica]]:
    """Two engines in this process that follow the same pointers."""
    prefix = store._champion.removesuffix(":champion")
    second = Replica(replace(config, redis=replace(config.redis, prefix=prefix)), "replica-2")
    second.start()
    yield replica, second
    second.stop()


def versions(pair: tuple[Replica, Replica]) -> list[str]:
    return [replica.loop.snapshot().drafter_version for replica in pair]


def canary(store: Store, artifact: Artifact, number: int, ttl_s: float = 60) -> Champion:
    manifest = artifact.manifest
    blob = store.put_blob(pack_blob(artifact))
    pointer = Champion(manifest.version, blob, manifest.base, manifest.target, manifest.kind, number, "base", 0.0)
    store.set_canary(Canary("replica-2", pointer), ttl_s=ttl_s)
    return pointer


def test_one_replica_serves_the_canary_and_the_other_follows_when_it_is_the_champion(
    pair: tuple[Replica, Replica], store: Store
) -> None:
    before = [answer(replica, "before") for replica in pair]
    pointer = canary(store, adapter(pair[0]), 1)
    assert eventually(lambda: versions(pair) == ["base", "v1"])
    assert [answer(replica, "during") for replica in pair] == before
    counted = store.counters
    assert eventually(lambda: any("served.requests|domain=chat|version=v1" in c for c in counted().values()))
    [name] = [name for (name, _), c in counted().items() if "served.requests|domain=chat|version=v1" in c]
    assert name == "replica-2", "what it served can be told from what the other did"
    store.set_champion(pointer)
    store.set_canary(None)
    assert eventually(lambda: versions(pair) == ["v1", "v1"])
    swaps = [replica.watcher.counters.total("swaps") for replica in pair]  # type: ignore[union-attr]
    assert swaps == [1, 1], "the canary had it already"


@pytest.mark.parametrize("end", ["taken back", "run out"])
def test_a_canary_that_ends_goes_back_to_the_champion_or_to_the_base(
    pair: tuple[Replica, Replica], store: Store, end: str
) -> None:
    artifact = adapter(pair[0], version="v2")

    def begin_and_end(others: str) -> None:
        canary(store, artifact, 2)
        assert eventually(lambda: versions(pair) == [others, "v2"])
        if end == "taken back":
            store.set_canary(None)
        else:
            canary(store, artifact, 2, ttl_s=0.05)  # and nobody renews it
        assert eventually(lambda: versions(pair) == [others, others])

    begin_and_end("base")
    publish(store, adapter(pair[0]), 1)
    assert eventually(lambda: versions(pair) == ["v1", "v1"])
    begin_and_end("v1")


def test_a_canary_that_makes_no_sense_or_does_not_fit_keeps_nobody_from_the_champion(
    pair: tuple[Replica, Replica], store: Store
) -> None:
    store._link.client.set(store._canary, '{"replica": "replica-2", "pointer": {"schema": 9}}')
    publish(store, adapter(pair[0]), 1)
    assert eventually(lambda: versions(pair) == ["v1", "v1"])
    refused = pair[1].watcher.counters  # type: ignore[union-attr]
    assert refused.total("swaps_refused.format") == 1
    canary(store, adapter(pair[0], version="v2", base="0" * 64), 2)
    assert eventually(lambda: refused.total("swaps_refused.base") == 1)
    assert versions(pair) == ["v1", "v1"]


def test_a_rollback_to_the_base_needs_no_blob(replica: Replica, store: Store) -> None:
    artifact = adapter(replica)
    publish(store, artifact, 1)
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "v1")
    publish(store, artifact, 2, version="base", blob="")
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "base")


@pytest.mark.parametrize(
    ("reason", "publish_bad"),
    [
        ("base", lambda store, replica: publish(store, adapter(replica, base="0" * 64), 1)),
        ("target", lambda store, replica: publish(store, adapter(replica, target="0" * 64 + ":fp16"), 1)),
        ("kind", lambda store, replica: publish(store, adapter(replica, form="full"), 1)),
        ("shape", lambda store, replica: publish(store, _misshapen(replica), 1)),
        ("hash", lambda store, replica: _publish_raw(store, replica, lambda blob: blob[:-4] + b"\0\0\0\1")),
        ("hash", lambda store, replica: _publish_raw(store, replica, lambda blob: blob[: len(blob) // 2])),
        ("truncated", lambda store, replica: _publish_torn(store, replica)),
        ("format", lambda store, replica: publish(store, adapter(replica, config={"rank": 0, "lora_alpha": 1}), 1)),
    ],
    ids=["base", "target", "kind", "shape", "flipped", "cut", "torn", "rank"],
)
def test_what_does_not_belong_is_refused_and_counted_and_serving_goes_on(
    replica: Replica, store: Store, reason: str, publish_bad: Callable[[Store, Replica], None]
) -> None:
    before = answer(replica, "before")
    publish_bad(store, replica)
    assert eventually(lambda: replica.watcher.counters.total(f"swaps_refused.{reason}") == 1)  # type: ignore[union-attr]
    assert replica.loop.snapshot().drafter_version == "base"
    assert answer(replica, "after") == before
    publish(store, adapter(replica, version="v2"), 2)
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "v2")


def test_a_pointer_that_makes_no_sense_is_refused_and_the_next_one_followed(replica: Replica, store: Store) -> None:
    artifact = adapter(replica)
    publish(store, artifact, 1, target=None)
    assert eventually(lambda: replica.watcher.counters.total("swaps_refused.format") == 1)  # type: ignore[union-attr]
    assert replica.loop.snapshot().drafter_version == "base"
    publish(store, artifact, 2)
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "v1")


def test_a_blob_that_cannot_be_fetched_is_no_refusal(
    replica: Replica, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis went away between the pointer and its blob, and comes back with both."""
    tries = 0

    def away(_: str) -> bytes:
        nonlocal tries
        tries += 1
        raise ServiceDown("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(replica._store, "get_blob", away)
        publish(store, adapter(replica), 1)
        assert eventually(lambda: tries >= 2)
    assert eventually(lambda: replica.loop.snapshot().drafter_version == "v1")
    assert not any(name.startswith("swaps_refused") for name in replica.watcher.counters.fields)  # type: ignore[union-attr]


def _misshapen(replica: Replica) -> Artifact:
    good = adapter(replica)
    return Artifact(good.manifest, {**good.tensors, "lm_head.lora_B": torch.zeros(31, RANK)})


def _publish_raw(store: Store, replica: Replica, spoil: Callable[[bytes], bytes]) -> None:
    """The pointer names the good blob's hash, Redis holds a spoiled one."""
    artifact = adapter(replica)
    digest = store.put_blob(pack_blob(artifact))
    store._link.run(lambda client: client.set(store._blob + digest, spoil(pack_blob(artifact))))
    _point(store, artifact, digest)


def _publish_torn(store: Store, replica: Replica) -> None:
    """A blob that was cut before it was hashed."""
    artifact = adapter(replica)
    _point(store, artifact, store.put_blob(pack_blob(artifact)[:-20]))


def _point(store: Store, artifact: Artifact, digest: str) -> None:
    manifest = artifact.manifest
    store.set_champion(
        Champion(manifest.version, digest, manifest.base, manifest.target, manifest.kind, 1, "base", 0.0)
    )


def test_traces_and_counters_reach_redis(replica: Replica, store: Store) -> None:
    tokens = answer(replica, "traced")
    assert eventually(lambda: store.stream_depth().length == 1)
    [(_, data)] = store.read_traces("reader", count=10, block_ms=100)
    record = decode(data)
    assert record.id == "traced"
    assert record.domain == "chat"
    assert record.output_ids.tolist() == tokens
    assert {round_.version for round_ in record.rounds if round_.drafted} == {"base"}
    assert eventually(lambda: any(c.get("requests_finished") == 1 for c in store.counters().values()))
    assert store.statuses()["replica:replica-1"]["drafter_version"] == "base"


def test_a_record_that_cannot_be_sent_is_counted_and_holds_up_no_other(replica: Replica, store: Store) -> None:
    publisher = replica.publisher
    assert publisher is not None
    publisher.offer("no record at all", None)  # type: ignore[arg-type]
    answer(replica, "after it")
    assert eventually(lambda: store.stream_depth().length == 1)
    assert (publisher.published, publisher.dropped) == (1, 1)


def test_without_redis_answers_are_the_same_and_the_loss_is_counted(config: Config, replica: Replica) -> None:
    expected = answer(replica, "with")
    away = replace(
        config, redis=replace(config.redis, url="redis://127.0.0.1:1/0"), trace=replace(config.trace, queue=2)
    )
    alone = Replica(away, "alone")
    alone.start()
    try:
        answers = [answer(alone, f"r{i}") for i in range(6)]
        assert answers == [expected] * 6
        # One record may be in the sender's hand, two wait in the queue, the rest is lost and counted.
        assert eventually(lambda: alone.publisher.dropped >= 3)  # type: ignore[union-attr]
    finally:
        alone.stop()
