"""The learner's base is serving's base, copies are its own, and a version is the base with its adapter merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.bank import DrafterBank
from learner.base import Base, input_embedding, load_base
from learner.example import Example, pack
from learner.lora import LoraSettings, add_lora, export_lora
from learner.measure import Measurer, served_version, typical_gamma
from learner.unroll import Drafter, unroll
from shared.artifact import Artifact, Manifest, load_folder
from shared.config import config_from_dict
from shared.models.target import load_model
from shared.trace import Round
from tests.learner.records import random_record
from tests.learner.traffic import Served, TinyServing
from tests.tiny import FAMILIES, build_tiny_model


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def served(serving: TinyServing) -> list[Served]:
    return list(serving.serve(6))


@pytest.fixture
def base(serving: TinyServing) -> Base:
    found = load_base(serving.config)
    assert found is not None
    return found


def examples(served: list[Served]) -> list[Example]:
    return [Example(item.record, torch.from_numpy(item.features)) for item in served]


@torch.no_grad()
def hidden(drafter: Drafter, served: list[Served]) -> torch.Tensor:
    return unroll(drafter, pack(examples(served), shift=1, judging=True), 1)[0].hidden


def adapter(base: Base, version: str, seed: int) -> Artifact:
    drafter, settings = base.copy(), LoraSettings(rank=4, lora_alpha=8, seed=seed)
    add_lora(drafter, settings)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=noise)
    manifest = Manifest(version, base.kind, "lora", base.target, base=base.hash)
    return export_lora(drafter, settings, manifest)


def test_the_base_is_the_one_that_serving_takes(serving: TinyServing, base: Base) -> None:
    assert (base.kind, base.hash) == ("eagle3", load_folder(serving.head_folder)[1])
    assert base.target.partition(":")[0] == serving.fingerprint.partition(":")[0]
    assert (base.vocab, base.feature_layers, base.feature_width) == (64, (0, 1), 64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_read_without_the_rest_of_the_target(tmp_path: Path, family: str, tied: bool) -> None:
    folder = build_tiny_model(tmp_path / "target", family=family, vocab=64, tied=tied)
    loaded = load_model(str(folder), home=tmp_path, device="cpu", weights="fp32")
    assert torch.equal(input_embedding(folder), loaded.model.get_input_embeddings().weight)


def test_a_language_model_is_a_base_as_well(serving: TinyServing, tmp_path: Path) -> None:
    small = build_tiny_model(tmp_path / "small", vocab=64, pad_vocab_to=70, hidden=16, seed=3)
    tree = serving.config.to_dict()
    tree["drafter"]["model"] = str(small)
    found = load_base(config_from_dict(tree))
    assert found is not None
    assert (found.kind, found.token_count, found.vocab, found.feature_layers) == ("model", 64, 70, ())
    before = {name: weight.clone() for name, weight in found.module.state_dict().items()}
    copy = found.copy()
    with torch.no_grad():
        next(copy.parameters()).add_(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in found.module.state_dict().items())
    measured = Measurer(found, DrafterBank(found, lambda version: None), gamma=2, champion=lambda: "base")
    (one,) = measured.measure([Example(random_record(1, vocab=60))])
    assert one.positions == 8
    assert one.live_sum == one.static_sum > 0


def test_where_nothing_drafts_there_is_no_base(serving: TinyServing) -> None:
    tree = serving.config.to_dict()
    tree["drafter"]["kind"] = "none"
    assert load_base(config_from_dict(tree)) is None


def test_copies_share_nothing_but_the_embedding(base: Base, served: list[Served]) -> None:
    before, copy = hidden(base.module, served), base.copy()
    torch.testing.assert_close(hidden(copy, served), before)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    torch.testing.assert_close(hidden(base.module, served), before)


def test_the_bank_merges_each_version_once_and_forgets_the_oldest(base: Base, served: list[Served]) -> None:
    shelf = {f"v{number}": adapter(base, f"v{number}", number) for number in (1, 2, 3)}
    asked: list[str] = []

    def find(version: str) -> Artifact | None:
        asked.append(version)
        return shelf.get(version)

    bank = DrafterBank(base, find, kept=2)
    assert bank.get("base") is base.module
    first = bank.get("v1")
    assert first is not None
    assert bank.get("v1") is first
    assert not torch.allclose(hidden(first, served), hidden(base.module, served), atol=1e-2)
    bank.get("v2"), bank.get("v1"), bank.get("v3"), bank.get("v1"), bank.get("v2")
    assert asked == ["v1", "v2", "v3", "v2"]
    assert bank.get("v9") is None


def test_an_adapter_that_cannot_be_merged_is_no_version(base: Base) -> None:
    whole = adapter(base, "v1", 1)
    torn = Artifact(whole.manifest, {name: tensor for name, tensor in whole.tensors.items() if "fc" not in name} | {})
    odd = replace(torn, tensors={**torn.tensors, "fc.lora_A": torch.zeros(4, 4)})
    assert DrafterBank(base, lambda version: odd).get("v1") is None


def test_each_request_is_judged_by_the_version_that_served_it(base: Base, served: list[Served]) -> None:
    better = adapter(base, "v1", 1)
    bank = DrafterBank(base, lambda version: better if version == "v1" else None)
    measurer = Measurer(base, bank, gamma=2, champion=lambda: "base")
    mine = examples(served)
    swapped = [
        replace(example, record=_by(example, version))
        for example, version in zip(mine, ("v1", "base", "v7", "v1"), strict=False)
    ]
    found = measurer.measure(swapped)
    assert [measured.version for measured in found] == ["v1", "base", "base", "v1"]
    assert measurer.unknown_versions == 1
    assert found[0].live_sum != found[0].static_sum
    assert found[1].live_sum == found[1].static_sum
    alone = measurer.measure(swapped[3:])[0]
    assert alone.live_sum == pytest.approx(found[3].live_sum, abs=1e-4)


def _by(example: Example, version: str):  # type: ignore[no-untyped-def]
    rounds = tuple(replace(round_, version=version) for round_ in example.record.rounds)
    return replace(example.record, rounds=rounds)


def test_the_version_and_gamma_of_a_request_are_those_of_most_of_its_rounds() -> None:
    rounds = (
        Round(1, "", (), 0, 0),
        Round(2, "v1", (5, 6, 7), 1, 2),
        Round(4, "v2", (5, 6), 2, 2),
        Round(7, "v2", (5,), 0, 1),
    )
    record = replace(random_record(1), rounds=rounds)
    assert (served_version(record), typical_gamma(record, 4)) == ("v2", 2)
    plain = replace(record, rounds=rounds[:1])
    assert (served_version(plain), typical_gamma(plain, 4)) == ("", 4)
