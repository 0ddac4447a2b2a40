"""Gamma auto stops using a useless drafter and takes it up again once it is good, whether it was told so or not.

The step costs are stated, so that the choice depends on acceptance alone: a draft pays from an alpha of 0.18 on. The
useless version is accepted at about 0.04, the trained one at about 0.28.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from learner.base import load_base
from learner.example import Example
from learner.lora import LoraSettings, add_lora, export_lora
from learner.trainer import TrainSettings, train
from serving.engine.request import GenerationParams, GenerationRequest
from serving.replica import Replica
from serving.spec.costs import CostCurve
from shared.artifact import Artifact, Manifest, pack_blob
from shared.config import config_from_dict
from shared.counters import Counters
from shared.store import Champion, Store
from shared.trace import Sampling
from tests.e2e.live import until
from tests.learner.traffic import VOCAB, TinyServing

TARGET_S, DRAFT_S = 1.0, 0.16  # (1 + alpha) / (1 + 0.16) exceeds 1 by the controller's margin from alpha 0.18 on


class Stated(CostCurve):
    """Costs what was said, whatever this machine measures."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._stated = seconds

    def add(self, size: int, seconds: float) -> None:
        pass

    def __call__(self, size: int) -> float:
        return self._stated

    @property
    def known(self) -> bool:
        return True


@pytest.fixture(scope="module")
def trained(serving: TinyServing) -> Artifact:
    base = load_base(serving.config)
    assert base is not None
    head, settings = base.copy(), LoraSettings(rank=16, lora_alpha=32)
    add_lora(head, settings)
    examples = [Example(one.record, torch.from_numpy(one.features)) for one in serving.serve(80)]
    train(head, examples, settings=TrainSettings(learning_rate=0.01, batch_tokens=128, epochs=3))
    return export_lora(head, settings, Manifest("good", base.kind, "lora", base.target, base=base.hash))


@pytest.fixture
def useless(trained: Artifact) -> Artifact:
    noise = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(tensor.shape, generator=noise) for name, tensor in trained.tensors.items()}
    return Artifact(replace(trained.manifest, version="useless"), tensors)


class Served:
    """A replica under gamma auto, and what the requests since the last look were served with."""

    def __init__(self, replica: Replica, store: Store) -> None:
        self.replica, self._store, self._asked, self._number = replica, store, 0, 0
        costs = replica._engine.controller.costs
        costs.by_rows, costs.draft_first, costs.draft_next = Stated(TARGET_S), Stated(DRAFT_S), Stated(DRAFT_S)
        costs.add_target = lambda *_: None  # type: ignore[method-assign]

    def publish(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        self._number += 1
        blob = self._store.put_blob(pack_blob(artifact))
        self._store.set_champion(
            Champion(manifest.version, blob, manifest.base, manifest.target, manifest.kind, self._number, "base", 0.0)
        )
        until(lambda: self.replica.loop.snapshot().drafter_version == manifest.version, "swapped")

    def drafted_share(self, requests: int) -> float:
        """Of the rounds of so many sampled requests."""
        before = Counters(self.replica.loop.snapshot().counters)
        asyncio.run(self._serve(requests))
        rounds = self._settled().minus(before)
        return rounds.total("spec_steps") / rounds.total("steps")

    def _settled(self) -> Counters:
        """A snapshot is of the last round, which may end a moment after the last event."""
        until(lambda: self.replica.loop.snapshot().counters.get("requests_finished") == self._asked, "finished")
        return Counters(self.replica.loop.snapshot().counters)

    async def _serve(self, requests: int) -> None:
        async def one(number: int) -> None:
            noise = torch.Generator().manual_seed(number)
            prompt = tuple(torch.randint(3, VOCAB, (8,), generator=noise).tolist())
            params = GenerationParams(Sampling(temperature=1.0), max_tokens=40, ignore_eos=True)
            async for _ in self.replica.loop.generate(GenerationRequest(f"r{number}", prompt, params, domain="chat")):
                pass

        first, self._asked = self._asked, self._asked + requests
        await asyncio.gather(*(one(number) for number in range(first, self._asked)))


@pytest.fixture
def served(serving: TinyServing, store: Store, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The exploration can be given by the test's parameter."""
    tree = serving.config.to_dict()
    tree["drafter"] |= {"gamma": "auto", "exploration": getattr(request, "param", 0.005), "swap_poll_s": 0.05}
    tree["redis"] |= {"url": redis_url, "prefix": store._champion.removesuffix(":champion")}
    tree["engine"] |= {"threads": 1, "max_queue": 200}
    replica = Replica(config_from_dict(tree), "replica")
    served = Served(replica, store)
    replica.start()
    yield served
    replica.stop()


def test_a_better_version_switches_it_on_again(served: Served, useless: Artifact, trained: Artifact) -> None:
    served.publish(useless)
    served.drafted_share(30)  # it had the benefit of the doubt
    assert served.drafted_share(60) < 0.05
    served.publish(trained)
    assert served.drafted_share(60) > 0.6


@pytest.mark.parametrize("served", [0.1], indirect=True, ids=["a tenth explores"])
def test_a_better_drafter_that_nobody_announced_is_found_by_exploration(
    served: Served, useless: Artifact, trained: Artifact
) -> None:
    served.publish(useless)
    served.drafted_share(30)
    assert served.drafted_share(60) < 0.2
    swap = served.replica._slot.prepare(trained, "better")  # type: ignore[union-attr]
    served.replica.loop.between_rounds(lambda _: swap())
    until(lambda: served.drafted_share(30) > 0.6, "taken up again")
