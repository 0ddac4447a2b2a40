"""An adapter's way: injected, trained, exported, merged elsewhere, continued; and what is refused on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.example import Example, pack
from learner.lora import LoraSettings, add_lora, export_lora, lora_targets
from learner.trainer import TrainSettings, train
from learner.unroll import Drafter, unroll
from shared.artifact import Artifact, Manifest, open_blob, pack_blob
from shared.errors import ArtifactError, ConfigError
from shared.models.lora import merge_lora
from tests.learner.records import random_example, random_record, tiny_head
from tests.tiny import build_tiny_model

MANIFEST = Manifest(version="v1", kind="eagle3", form="full", target="abc:fp16", base="0" * 64)
SETTINGS = LoraSettings(rank=4, lora_alpha=8, seed=1)
EXAMPLES = [random_example(seed) for seed in range(4)]
TRAIN = TrainSettings(learning_rate=1e-2, batch_tokens=16, epochs=2)


def trained_adapter(parent: Artifact | None = None) -> tuple[Drafter, Artifact]:
    head = tiny_head()
    add_lora(head, SETTINGS, parent)
    train(head, EXAMPLES, settings=TRAIN)
    return head, export_lora(head, SETTINGS, MANIFEST)


@torch.no_grad()
def first_logits(drafter: Drafter) -> torch.Tensor:
    shift = 1 if hasattr(drafter, "draft_ids") else 0
    examples = EXAMPLES if shift else [Example(random_record(0))]
    rows = unroll(drafter, pack(examples, shift=shift), 3)[-1]
    return rows.project(rows.hidden)


def test_a_merged_copy_computes_what_was_trained_after_the_way_through_a_blob() -> None:
    live, artifact = trained_adapter()
    assert artifact.manifest.form == "lora"
    assert artifact.manifest.config == {"rank": 4, "lora_alpha": 8, "targets": []}
    merged = tiny_head()
    untouched = first_logits(merged)
    merge_lora(merged, open_blob(pack_blob(artifact)))
    torch.testing.assert_close(first_logits(merged), first_logits(live), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(first_logits(merged), untouched, atol=1e-2)


def test_a_fresh_adapter_changes_nothing_and_follows_its_seed() -> None:
    head, same, other = tiny_head(), tiny_head(), tiny_head()
    before = first_logits(head)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    for drafter, seed in ((head, 1), (same, 1), (other, 2)):
        add_lora(drafter, replace(SETTINGS, seed=seed))
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator moved"
    torch.testing.assert_close(first_logits(head), before)
    first, second, third = (export_lora(d, SETTINGS, MANIFEST).tensors["lm_head.lora_A"] for d in (head, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_a_child_starts_where_its_parent_ended_and_stands_by_itself() -> None:
    parent_head, parent = trained_adapter()
    child = tiny_head()
    add_lora(child, replace(SETTINGS, seed=9), parent)
    torch.testing.assert_close(first_logits(child), first_logits(parent_head))
    train(child, EXAMPLES, settings=TRAIN)
    merged = tiny_head()  # the base, not the parent
    merge_lora(merged, export_lora(child, SETTINGS, MANIFEST))
    torch.testing.assert_close(first_logits(merged), first_logits(child), atol=1e-5, rtol=1e-4)


def test_training_does_not_continue_from_a_parent_that_does_not_fit() -> None:
    _, parent = trained_adapter()
    for settings in (
        replace(SETTINGS, rank=2, lora_alpha=4),
        replace(SETTINGS, lora_alpha=16),
        replace(SETTINGS, targets=("fc",)),
    ):
        with pytest.raises(ArtifactError, match="parent") as caught:
            add_lora(tiny_head(), settings, parent)
        assert caught.value.reason == "shape"


def test_targets_choose_linears_by_name() -> None:
    head = tiny_head()
    assert lora_targets(head, ("q_proj", "fc")) == ["fc", "q_proj"]
    assert len(lora_targets(head, ())) == 9
    with pytest.raises(ConfigError, match=r"learner\.lora_targets.*query.*q_proj"):
        lora_targets(head, ("query",))


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        ("shape", lambda t: t | {"fc.lora_A": t["fc.lora_A"][:, :-1]}),
        ("shape", lambda t: t | {"fc.lora_B": t["fc.lora_B"][:-1]}),
        ("shape", lambda t: t | {"fc.lora_A": t["fc.lora_A"][:2], "fc.lora_B": t["fc.lora_B"][:, :2]}),
        ("shape", lambda t: {k: v for k, v in t.items() if k != "fc.lora_B"}),
        ("shape", lambda t: t | {"extra": torch.zeros(1)}),
        ("shape", lambda t: t | {"gone.lora_A": t["fc.lora_A"], "gone.lora_B": t["fc.lora_B"]}),
        ("shape", lambda t: t | {"norm.lora_A": t["fc.lora_A"], "norm.lora_B": t["fc.lora_B"]}),
        ("shape", lambda t: {}),
        ("format", lambda t: t | {"up_proj.lora_B": t["up_proj.lora_B"] * float("nan")}),
    ],
)
def test_a_bad_adapter_is_refused_before_a_weight_changes(reason: str, spoil) -> None:  # type: ignore[no-untyped-def]
    _, artifact = trained_adapter()
    head = tiny_head()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with pytest.raises(ArtifactError) as caught:
        merge_lora(head, Artifact(artifact.manifest, spoil(dict(artifact.tensors))))
    assert caught.value.reason == reason
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("config", [{}, {"rank": 0, "lora_alpha": 8}, {"rank": 4, "lora_alpha": "x"}])
def test_a_manifest_without_a_scale_is_refused(config: dict[str, object]) -> None:
    _, artifact = trained_adapter()
    with pytest.raises(ArtifactError, match=r"config|positive") as caught:
        merge_lora(tiny_head(), Artifact(replace(artifact.manifest, config=config), artifact.tensors))
    assert caught.value.reason == "format"


def test_a_language_model_merges_too(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, vocab=60, tied=True)
    live, merged = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    add_lora(live, SETTINGS)
    train(live, [Example(random_record(seed)) for seed in range(4)], settings=TRAIN)
    merge_lora(merged, export_lora(live, SETTINGS, replace(MANIFEST, kind="model")))
    torch.testing.assert_close(first_logits(merged), first_logits(live), atol=1e-4, rtol=1e-4)
