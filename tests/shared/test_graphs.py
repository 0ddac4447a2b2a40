"""Recorded decode steps: buckets, padding and addresses, with a recorder that runs anywhere; on CUDA, real graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.models.graphs import MOST_ROWS, Outputs, StepGraphs, power_of_two
from shared.models.paged import AttentionPlan, PagedKV, PagedModel, Segment
from shared.models.target import load_model
from tests.fakes_graphs import Repeat
from tests.tiny import build_tiny_model

CLOSE = {"rtol": 0, "atol": 1e-4}  # fp32 sums in another order


def models(tmp_path: Path, recorder: Repeat, family: str = "llama") -> tuple[PagedModel, PagedModel]:
    """The same weights, plain and recorded, each over a cache of its own."""
    folder = build_tiny_model(tmp_path / "m", family=family)
    plain, recorded = (load_model(str(folder), home=tmp_path, device="cpu", weights="fp32") for _ in range(2))
    return (
        PagedModel(plain, PagedKV(24, 4), (0, 1)),
        PagedModel(recorded, PagedKV(24, 4), (0, 1), recorder=recorder),
    )


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_recorded_steps_compute_what_plain_ones_do(tmp_path: Path, family: str) -> None:
    """Ragged rows, growing contexts, sequences that come and go: verification, plain decoding, a window of 16."""
    recorder = Repeat()
    plain, recorded = models(tmp_path, recorder, family)
    tables = [[3, 9, 1, 17, 4, 8, 11], [0, 2, 5, 6, 7, 10, 12]]
    prompts = [list(range(3, 3 + MOST_ROWS + 1)), list(range(30, 30 + MOST_ROWS + 3))]
    for table, prompt in zip(tables, prompts, strict=True):
        for model in (plain, recorded):
            model.forward(prompt, [Segment(table, 0, len(prompt))], [len(prompt) - 1])
    assert recorder.records == 0, "prompts are not recorded"
    lengths = [len(prompt) for prompt in prompts]
    for counts in ([1, 1], [3, 1], [2, 0], [1, 2], [0, 1], [3, 2]):
        segments = [Segment(tables[i], lengths[i], n) for i, n in enumerate(counts) if n]
        ids = [5 + 7 * row for row in range(sum(counts))]
        select = [0, sum(counts) - 1] if sum(counts) > 1 else [0]
        a, b = (model.forward(ids, segments, select) for model in (plain, recorded))
        torch.testing.assert_close(a.logits, b.logits, **CLOSE)
        torch.testing.assert_close(a.features, b.features, **CLOSE)
        lengths = [length + n for length, n in zip(lengths, counts, strict=True)]
    assert 1 < recorder.records < 6, "steps of one bucket share a record"
    for index in range(2):
        used = slice(0, 24 * 4)
        torch.testing.assert_close(plain.kv._pools[index][used], recorded.kv._pools[index][used], **CLOSE)


def test_padding_touches_the_scratch_block_only() -> None:
    kv = PagedKV(6, 4)

    def step(plan: AttentionPlan, inputs: tuple[Tensor, ...]) -> Outputs:
        rows = inputs[0]
        return (plan.attend(0, rows.view(len(rows), 1, 2), torch.cat([rows, rows], 1), kv_heads=1, scale=1.0),)

    graphs = StepGraphs(step, kv, 24, torch.device("cpu"), Repeat())
    kv.pool(0, torch.empty(0, 4))
    segments = [Segment([5, 2], 4, 2), Segment([1], 0, 1), Segment([4], 2, 1)]  # padded to four sequences of two rows
    (out,) = graphs.run(segments, (torch.ones(4, 2),))
    assert out.shape == (4, 2)
    written = kv._pools[0].abs().sum(1).nonzero().flatten().tolist()
    owned = [slot for slot in written if slot < 24]
    assert owned == [4, 8, 9, 18], "position 0 of block 1, 4 and 5 in block 2, 2 in block 4"
    assert {slot for slot in written if slot >= 24} <= {24}, "and the first slot of the scratch block"


def test_outputs_outlive_the_next_step() -> None:
    graphs = StepGraphs(lambda plan, inputs: (inputs[0] * 2,), PagedKV(2, 4), 8, torch.device("cpu"), Repeat())
    first = graphs.run([Segment([0], 0, 1)], (torch.ones(1, 3),))[0]
    graphs.run([Segment([0], 1, 1)], (torch.full((1, 3), 5.0),))
    assert first.tolist() == [[2.0] * 3]


def test_another_cache_is_recorded_anew(tmp_path: Path) -> None:
    recorder = Repeat()
    _, recorded = models(tmp_path, recorder)
    recorded.forward([5], [Segment([0], 0, 1)], [0])
    recorded.kv = PagedKV(8, 4)
    recorded.forward([5], [Segment([0], 0, 1)], [0])
    assert recorder.records == 2
    assert recorded.kv._pools, "the new cache was written"


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64)])
def test_buckets_are_powers_of_two(count: int, bucket: int) -> None:
    assert power_of_two(count) == bucket


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_compute_what_eager_steps_do(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", hidden=64)
    loaded = load_model(str(folder), home=tmp_path, device="cuda", weights="bf16")
    graphed, eager = PagedModel(loaded, PagedKV(24, 4)), PagedModel(loaded, PagedKV(24, 4))
    eager._recorder = None
    prompt = list(range(3, 23))
    for model in (graphed, eager):
        model.forward(prompt, [Segment([3, 9, 1, 17, 4, 8, 11], 0, 20)], [19])
    for start in range(20, 26):
        segments = [Segment([3, 9, 1, 17, 4, 8, 11], start, 1)]
        a, b = (model.forward([start], segments, [0]).logits for model in (graphed, eager))
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-4)  # bf16, sums in another order
