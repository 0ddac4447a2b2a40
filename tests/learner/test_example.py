"""Packing keeps rows, tokens and targets aligned, whatever is cut off or padded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from learner.example import Example, pack, plan_epoch, row_count, wanted_positions
from shared.errors import TraceError
from tests.learner.records import random_example, random_record


@pytest.mark.parametrize("shift", [0, 1], ids=["language model", "head"])
@pytest.mark.parametrize("max_rows", [0, 10])
@pytest.mark.parametrize("judging", [False, True])
def test_each_wanted_row_reads_what_comes_before_the_token_it_predicts(
    shift: int, max_rows: int, judging: bool
) -> None:
    examples = [
        random_example(0, prompt=5, outputs=9, share=0.6),
        random_example(1, prompt=12, outputs=3),
        random_example(2, prompt=1, outputs=2),
    ]
    batch = pack(examples, shift=shift, max_rows=max_rows, judging=judging)
    for i, example in enumerate(examples):
        record = example.record
        sequence = np.concatenate([record.prompt_ids, record.output_ids])
        mine = batch.example == i
        wanted = wanted_positions(record, judging=judging)
        first_kept = max(row_count(record, shift) - max_rows, 0) if max_rows else 0
        rows = len(record.prompt_ids) + wanted - 1 - shift
        assert batch.committed[mine].tolist() == wanted[rows >= first_kept].tolist()
        for row, t in zip(batch.row[mine].tolist(), batch.committed[mine].tolist(), strict=True):
            place = int(batch.positions[i, row])
            # The last token that a row has read stands right before the one that it predicts.
            assert place + shift + 1 == len(record.prompt_ids) + t
            assert batch.token_ids[i, row] == sequence[place + shift]
            if shift:
                assert batch.features is not None
                assert example.features is not None
                assert torch.equal(batch.features[i, row], example.features[place].float())


def test_targets_follow_their_position() -> None:
    example = random_example(3, outputs=20, share=0.5)
    record = example.record
    batch = pack([example], shift=1)
    assert 0 < len(batch.row) < 20
    for m, t in enumerate(batch.committed.tolist()):
        at = record.topk_positions.tolist().index(t)
        assert batch.topk_ids[m].tolist() == record.topk_ids[at].tolist()
        assert batch.topk_logprobs[m].tolist() == record.topk_logprobs[at].astype(np.float32).tolist()
        assert bool(batch.rejected[m]) == (t in record.rejected[:, 0])
    assert batch.rejected.any()


def test_records_of_different_k_share_a_batch() -> None:
    batch = pack([random_example(0, topk=3), random_example(1, topk=6)], shift=1)
    short = batch.example == 0
    assert (batch.topk_ids[short][:, 3:] == -1).all()
    assert (batch.topk_logprobs[short][:, 3:] == float("-inf")).all()


def test_features_of_another_request_are_refused() -> None:
    example = random_example(0)
    assert example.features is not None
    with pytest.raises(TraceError, match="request-0"):
        pack([Example(example.record, example.features[:-1])], shift=1)
    with pytest.raises(TraceError, match="none"):
        pack([Example(random_record(0))], shift=1)


def test_an_epoch_holds_each_example_once_in_batches_of_the_asked_size() -> None:
    rng = random.Random(1)
    sizes = [(rng.randrange(10, 200), rng.randrange(0, 50)) for _ in range(300)]
    plan = plan_epoch(sizes, 400, random.Random(0))
    assert sorted(i for batch in plan for i in batch) == [i for i, (_, wanted) in enumerate(sizes) if wanted]
    assert all(sum(sizes[i][1] for i in batch) <= 400 for batch in plan)
    assert plan == plan_epoch(sizes, 400, random.Random(0))
    padded = sum(len(batch) * max(sizes[i][0] for i in batch) for batch in plan)
    assert padded < 1.2 * sum(rows for rows, wanted in sizes if wanted)
