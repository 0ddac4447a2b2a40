"""Training lowers its loss, repeats itself bit for bit, touches only what it may, and has the plain gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner import trainer
from learner.example import Example, pack
from learner.lora import LoraSettings, add_lora
from learner.losses import distil, row_targets
from learner.trainer import Progress, TrainSettings, train
from learner.unroll import column_index, unroll
from tests.learner.records import random_example, random_record, tiny_head
from tests.tiny import build_tiny_model

SETTINGS = TrainSettings(learning_rate=1e-2, batch_tokens=24, epochs=15, seed=3)
EXAMPLES = [random_example(seed, outputs=6 + seed) for seed in range(6)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_falls_and_the_overlap_rises(lora: bool, bf16: bool) -> None:
    head = tiny_head()
    if lora:
        add_lora(head, LoraSettings(rank=8, lora_alpha=16))
    seen: list[Progress] = []
    report = train(head, EXAMPLES, settings=replace(SETTINGS, bf16=bf16), progress=seen.append)
    assert report.loss_last < 0.7 * report.loss_first
    assert len(report.overlap_last) == SETTINGS.ttt_steps
    assert report.overlap_last[0] > seen[0].overlap[0]
    assert report.steps == len(seen) == len(report.losses)
    assert report.tokens == seen[-1].tokens == 15 * sum(len(e.record.output_ids) - 1 for e in EXAMPLES)
    assert 0 < report.lost < 1
    assert not head.training


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def trained(seed: int) -> torch.Tensor:
        head = tiny_head()
        train(head, EXAMPLES, settings=replace(SETTINGS, epochs=2, seed=seed))
        return head.lm_head.weight.detach()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_lora_leaves_the_base_and_the_embedding_alone() -> None:
    head = tiny_head()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    embedding = head._embedding[0].clone()
    add_lora(head, LoraSettings(rank=4))
    train(head, EXAMPLES, settings=replace(SETTINGS, epochs=1))
    after = {name.replace("base_layer.", ""): value for name, value in head.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(head._embedding[0], embedding)


def test_chunks_add_up_to_the_plain_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_LOGITS_AT_ONCE", 16 * 24)  # 16 rows of 24 columns at a time
    settings = replace(SETTINGS, rejected_weight=3.0)
    batch = pack(EXAMPLES, shift=1)
    chunked, plain = tiny_head(), tiny_head()
    trainer._backward(chunked, batch, column_index(chunked), settings)

    column_of = column_index(plain)
    assert column_of is not None
    targets = row_targets(batch.topk_ids.clamp_max(len(column_of) - 1), batch.topk_logprobs, column_of)
    weight = targets.kept * (1 + 2.0 * batch.rejected)
    assert batch.rejected.any()
    loss = torch.zeros(())
    for k, depth in enumerate(unroll(plain, batch, 3)):
        row_loss = distil(depth.project(depth.hidden), targets.take(depth.picks), "forward_kl").loss
        loss = loss + 0.8**k * (row_loss * weight[depth.picks]).mean()
    (loss / (1 + 0.8 + 0.64)).backward()
    for ours, theirs in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_a_language_model_learns_in_full_and_through_lora(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, vocab=60, tied=True)
    examples = [Example(random_record(seed)) for seed in range(4)]
    for lora in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        if lora:
            add_lora(model, LoraSettings(rank=4))
            assert not any("embed" in n or "lm_head" in n for n, p in model.named_parameters() if p.requires_grad)
        report = train(model, examples, settings=SETTINGS)
        assert report.loss_last < 0.8 * report.loss_first
        assert len(report.overlap_last) == 1


def test_nothing_to_learn_from_is_a_report_of_zero_steps() -> None:
    head = tiny_head()
    report = train(head, [random_example(0, outputs=1)], settings=SETTINGS)
    assert (report.steps, report.tokens, report.skipped) == (0, 0, 1)


def test_steps_overrule_epochs() -> None:
    assert train(tiny_head(), EXAMPLES, settings=replace(SETTINGS, steps=7)).steps == 7
