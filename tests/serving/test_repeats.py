"""A greedy or seeded request repeats through the service: after a restart, under another drafter, gamma and load.

`system_fingerprint` names what could change it, and stays the same through all of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch

from serving.api.router import create_app
from serving.drafters.load import BASE_VERSION
from serving.engine import numerics
from serving.replica import Replica
from shared.artifact import load_folder
from shared.config import Config
from shared.counters import Counters
from shared.store import Champion, Store
from tests.e2e.live import until
from tests.learner.traffic import VOCAB, TinyServing, random_adapter
from tests.serving.api.conftest import MODEL, service_of
from tests.tiny import build_tiny_model

PROMPTS = ("w5 w9 w31", "w40 w7", "w12 w12 w3 w60 w22")
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.7},
    {"seed": 7},
    {"seed": -5, "temperature": 1.4, "top_p": 0.9},
    {"seed": 2**40, "top_k": 12, "frequency_penalty": 0.5, "n": 2},
)
BODIES = [
    {"model": MODEL, "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True, **fields}
    for prompt in PROMPTS
    for fields in FIELDS
]
STRANGERS = [{"model": MODEL, "prompt": f"w{n} w{n + 1}", "max_tokens": 40, "ignore_eos": True} for n in range(12)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    settings = {"drafter.swap_poll_s": 0.05, "engine.kv_tokens": 4096, "engine.threads": 1}
    return TinyServing(tmp_path_factory.mktemp("repeats"), **settings)


@contextmanager
def running(config: Config) -> Iterator[Replica]:
    replica = Replica(config, "replica-1")
    replica.start()
    try:
        yield replica
    finally:
        replica.stop()


def said(replica: Replica, *, crowd: bool = False) -> tuple[list[Any], str]:
    """The answers' tokens and texts, and the one fingerprint of all; in a crowd all are asked at once."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(service_of(replica)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            if not crowd:
                return [await client.post("/v1/completions", json=body) for body in BODIES]
            everybody = [client.post("/v1/completions", json=body) for body in [*STRANGERS, *reversed(BODIES)]]
            return (await asyncio.gather(*everybody))[: len(STRANGERS) - 1 : -1]

    answers = [answer.raise_for_status().json() for answer in asyncio.run(ask())]
    [fingerprint] = {answer["system_fingerprint"] for answer in answers}
    return [[(c["token_ids"], c["text"]) for c in answer["choices"]] for answer in answers], fingerprint


def test_an_answer_repeats_whatever_drafts_and_whoever_else_asks(serving: TinyServing, redis_url: str) -> None:
    config = replace(serving.config, redis=replace(serving.config.redis, url=redis_url, prefix=f"test-{uuid4().hex}"))
    store = Store(redis_url, config.redis.prefix)
    with running(config) as replica:
        first = said(replica)
        assert replica.status()["drafter_version"] == BASE_VERSION
        assert said(replica, crowd=True) == first
        blob, base = store.put_blob(random_adapter(serving)), load_folder(serving.head_folder)[1]
        store.set_champion(Champion("bad", blob, base, serving.fingerprint, "eagle3", 1, "", 1.0))
        until(lambda: replica.status()["drafter_version"] == "bad", "swapped")
        assert said(replica) == first
        assert said(replica, crowd=True) == first
        counters = Counters(replica.loop.snapshot().counters)
        assert min(counters.total("drafted", version=version) for version in (BASE_VERSION, "bad")) > 0
    store.close()
    for gamma in (0, 1, 4):  # each a restart
        with running(replace(serving.config, drafter=replace(serving.config.drafter, gamma=gamma))) as replica:
            assert said(replica, crowd=gamma == 4) == first
    with running(replace(serving.config, drafter=replace(serving.config.drafter, kind="none"))) as replica:
        assert said(replica) == first


def test_the_fingerprint_names_what_could_change_an_answer(
    serving: TinyServing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(config: Config) -> str:
        return service_of(Replica(config, "r")).backend().system_fingerprint

    def undrafted(**target: Any) -> Config:
        target = {"model": serving.config.target.model, "dtype": "fp32", **target}
        config = replace(serving.config, target=replace(serving.config.target, **target))
        return replace(config, drafter=replace(config.drafter, kind="none"))

    found = [fingerprint(undrafted()), fingerprint(undrafted(dtype="int8"))]
    found.append(fingerprint(undrafted(model=str(build_tiny_model(tmp_path / "other", vocab=VOCAB, seed=1)))))
    with monkeypatch.context() as patch:
        patch.setattr(numerics, "VERSION", numerics.VERSION + 1)
        found.append(fingerprint(undrafted()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", f"{torch.__version__}1")
        found.append(fingerprint(undrafted()))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        found.append(fingerprint(undrafted()))
    assert len(set(found)) == len(found)
    assert fingerprint(serving.config) == found[0], "a drafter is not among them"
