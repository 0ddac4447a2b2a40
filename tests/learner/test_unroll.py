"""The unrolled forward equals serving's own loop: one row after another over an explicit list of keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.example import Example, pack
from learner.unroll import unroll
from shared.models.eagle3 import Eagle3Head
from tests.learner.records import random_example, random_record, tiny_head
from tests.tiny import build_tiny_model

DEPTHS = 4


class KeyList:
    """Attention of one row at a time over a growing list; `length` forgets what a round left behind."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # [1, heads, dim]
        self.entries.append((key[0], value[0]))
        keys = torch.stack([k for k, _ in self.entries])  # [entries, kv_heads, dim]
        values = torch.stack([v for _, v in self.entries])
        out = torch.empty_like(query[0])
        per_kv = query.shape[1] // key.shape[1]
        for h in range(query.shape[1]):
            weights = (keys[:, h // per_kv] @ query[0, h] * scale).softmax(0)
            out[h] = weights @ values[:, h // per_kv]
        return out.unsqueeze(0)


def drafted_logits(head: Eagle3Head, example: Example, start: int, depth: int) -> Tensor:
    """Logits after `depth` draft steps of a round that starts at row `start`, the drafts being the recorded tokens."""
    assert example.features is not None
    tokens = [*example.record.prompt_ids.tolist(), *example.record.output_ids.tolist()]
    keys = KeyList()
    hidden = torch.empty(0)
    for row in range(start + depth):
        fused = head.fuse(example.features[row : row + 1].float()) if row <= start else hidden
        hidden = head(torch.tensor([tokens[row + 1]]), fused, torch.tensor([row]), keys.attend)
    return head.logits(hidden)[0]


@torch.no_grad()
@pytest.mark.parametrize("judging", [False, True])
def test_every_depth_equals_a_round_of_serving(judging: bool) -> None:
    head = tiny_head()
    examples = [
        random_example(0, prompt=6, outputs=8, share=0.7),
        random_example(1, prompt=1, outputs=7),
        random_example(2, prompt=11, outputs=3),
    ]
    batch = pack(examples, shift=1, judging=judging)
    found = unroll(head, batch, DEPTHS)
    assert len(found) == DEPTHS
    compared = 0
    for depth, rows in enumerate(found, start=1):
        logits = rows.project(rows.hidden)
        reachable = [m for m in range(len(batch.row)) if batch.row[m] >= depth - 1]
        assert rows.picks.tolist() == reachable
        for m, logit in zip(rows.picks.tolist(), logits, strict=True):
            example, row = examples[int(batch.example[m])], int(batch.row[m])
            expected = drafted_logits(head, example, row - depth + 1, depth)
            torch.testing.assert_close(logit, expected, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared > 40


@torch.no_grad()
def test_a_cut_prompt_is_a_shorter_prompt_at_the_old_row_numbers() -> None:
    """Rotary positions are relative, so the numbers themselves do not show in the logits."""
    head = tiny_head()
    example = random_example(0, prompt=10, outputs=6)
    assert example.features is not None
    cut = pack([example], shift=1, max_rows=10)
    short = Example(replace(example.record, prompt_ids=example.record.prompt_ids[4:]), example.features[4:])
    alone = pack([short], shift=1)
    assert cut.positions.tolist() == (alone.positions + 4).tolist()
    for ours, theirs in zip(unroll(head, cut, 3), unroll(head, alone, 3), strict=True):
        assert ours.picks.tolist() == theirs.picks.tolist()
        torch.testing.assert_close(ours.hidden, theirs.hidden, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_language_model_runs_as_it_does_alone(family: str, tmp_path: Path) -> None:
    """Batched, padded and cut to the wanted rows; gemma2 caps its logits after the projection."""
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, family=family, vocab=60)).eval()
    records = [random_record(0, prompt=5, outputs=9), random_record(1, prompt=20, outputs=6, share=0.5)]
    batch = pack([Example(record) for record in records], shift=0)
    (rows,) = unroll(model, batch, DEPTHS)
    logits = rows.project(rows.hidden)
    for i, record in enumerate(records):
        ids = torch.tensor([[*record.prompt_ids.tolist(), *record.output_ids.tolist()]])
        alone = model(input_ids=ids).logits[0]
        mine = batch.example == i
        expected = alone[len(record.prompt_ids) + batch.committed[mine] - 1]
        torch.testing.assert_close(logits[mine], expected, atol=1e-4, rtol=1e-4)
    assert model(input_ids=ids).logits.shape[1] == ids.shape[1], "the row cut outlived the call"
