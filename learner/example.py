"""What is learnt from: a trace with its features, packed into padded tensors.

Owns the alignment of rows to committed tokens. With P prompt tokens and sequence s, committed token t is s[P + t].
A head's row i reads the embedding of s[i + 1] and the features of position i and predicts s[i + 2]; a language model's
row i reads s[i] and predicts s[i + 1]. `shift` is 1 and 0 for the two, and t is predicted by row P + t - 1 - shift.
Token 0 comes out of the prefill and is never drafted, so it is never a wanted row. It knows nothing of losses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import TraceError
from shared.trace import TraceRecord

_BUCKET = 8  # batches drawn together and sorted by length, so that little of a batch is padding


@dataclass(frozen=True)
class Example:
    """One finished request; `features` is [prompt + n - 1, layers * target_hidden], None for a drafter without."""

    record: TraceRecord
    features: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """b examples of at most `rows` rows, and the m rows whose predictions are wanted, example by example."""

    token_ids: Tensor  # [b, rows] what each row reads; padding is 0 and comes last
    features: Tensor | None  # [b, rows, layers * target_hidden]
    positions: Tensor  # [b, rows] row numbers in the whole sequence
    example: Tensor  # [m]
    row: Tensor  # [m] column of `token_ids`
    committed: Tensor  # [m] position t of the predicted token, at least 1
    topk_ids: Tensor  # [m, k] target ids; -1 fills. k is 0 when packed for judging
    topk_logprobs: Tensor  # [m, k] float32, raw; -inf fills
    rejected: Tensor  # [m] bool: a draft was rejected there

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def wanted_positions(record: TraceRecord, *, judging: bool) -> NDArray[np.int64]:
    """Committed positions from 1 on: all of them for judging, those with a stored distribution for training."""
    if judging:
        return np.arange(1, len(record.output_ids))
    return np.asarray(record.topk_positions[record.topk_positions >= 1], dtype=np.int64)


def row_count(record: TraceRecord, shift: int) -> int:
    """Rows that predict a token of the sequence."""
    return max(len(record.prompt_ids) + len(record.output_ids) - 1 - shift, 0)


def pack(examples: Sequence[Example], *, shift: int, max_rows: int = 0, judging: bool = False) -> Batch:
    """Pads to the longest. Beyond `max_rows` (0: no limit) an example loses rows from the left; positions stay.

    Raises TraceError when features do not fit their record.
    """
    rows = [row_count(example.record, shift) for example in examples]
    cuts = [max(count - max_rows, 0) if max_rows else 0 for count in rows]
    width = max(count - cut for count, cut in zip(rows, cuts, strict=True))
    token_ids = torch.zeros((len(examples), width), dtype=torch.long)
    positions = torch.zeros((len(examples), width), dtype=torch.long)
    features = _feature_pool(examples, width) if shift else None
    picked: list[_Wanted] = []
    for index, (example, count, cut) in enumerate(zip(examples, rows, cuts, strict=True)):
        record, kept = example.record, count - cut
        sequence = np.concatenate([record.prompt_ids, record.output_ids])
        token_ids[index, :kept] = torch.from_numpy(sequence[shift + cut : shift + count].astype(np.int64))
        positions[index] = torch.arange(cut, cut + width)
        if features is not None:
            features[index, :kept] = _features(example)[cut:count].to(features.dtype)
        picked.append(_wanted(record, shift=shift, cut=cut, judging=judging))
    k = max(found.topk_ids.shape[1] for found in picked)
    return Batch(
        token_ids=token_ids,
        features=features,
        positions=positions,
        example=torch.cat([torch.full((len(found.row),), i) for i, found in enumerate(picked)]),
        row=torch.cat([torch.from_numpy(found.row) for found in picked]),
        committed=torch.cat([torch.from_numpy(found.committed) for found in picked]),
        topk_ids=torch.cat([_widen(found.topk_ids.astype(np.int64), k, -1) for found in picked]),
        topk_logprobs=torch.cat([_widen(found.topk_logprobs.astype(np.float32), k, -np.inf) for found in picked]),
        rejected=torch.cat([torch.from_numpy(found.rejected) for found in picked]),
    )


def plan_epoch(
    sizes: Sequence[tuple[int, int]],  # (rows, wanted rows) of each example
    batch_tokens: int,
    order: random.Random,
) -> list[list[int]]:
    """Indices of each batch of one pass: about `batch_tokens` wanted rows, of similar length, in random order.

    Examples without a wanted row are left out.
    """
    indices = [i for i, (_, wanted) in enumerate(sizes) if wanted]
    order.shuffle(indices)
    batches: list[list[int]] = []
    for chunk in _cut(indices, sizes, batch_tokens * _BUCKET):
        batches.extend(_cut(sorted(chunk, key=lambda i: sizes[i][0]), sizes, batch_tokens))
    order.shuffle(batches)
    return batches


def _cut(indices: list[int], sizes: Sequence[tuple[int, int]], tokens: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    filled = 0
    for i in indices:
        if groups[-1] and filled + sizes[i][1] > tokens:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += sizes[i][1]
    return [group for group in groups if group]


@dataclass(frozen=True)
class _Wanted:
    row: NDArray[np.int64]  # [m]
    committed: NDArray[np.int64]  # [m]
    topk_ids: NDArray[np.int32]  # [m, k]
    topk_logprobs: NDArray[np.float16]  # [m, k]
    rejected: NDArray[np.bool_]  # [m]


def _wanted(record: TraceRecord, *, shift: int, cut: int, judging: bool) -> _Wanted:
    committed = wanted_positions(record, judging=judging)
    rows = len(record.prompt_ids) + committed - 1 - shift - cut
    # A head over a one-token prompt has every row it needs (t=1 is row 0); a cut may have taken the first ones.
    committed, rows = committed[rows >= 0], rows[rows >= 0]
    rejected = np.isin(committed, record.rejected[:, 0])
    if judging:
        empty = np.zeros((len(rows), 0))
        return _Wanted(rows, committed, empty.astype(np.int32), empty.astype(np.float16), rejected)
    at = np.searchsorted(record.topk_positions, committed)
    return _Wanted(rows, committed, record.topk_ids[at], record.topk_logprobs[at], rejected)


def _features(example: Example) -> Tensor:
    record, features = example.record, example.features
    wanted = len(record.prompt_ids) + len(record.output_ids) - 1
    if features is None or features.ndim != 2 or features.shape[0] != wanted:
        found = "none" if features is None else f"shape {tuple(features.shape)}"
        raise TraceError(f"features of request {record.id}: {found}, but the record needs {wanted} rows")
    return features


def _feature_pool(examples: Sequence[Example], width: int) -> Tensor:
    return torch.zeros((len(examples), width, _features(examples[0]).shape[1]), dtype=torch.float32)


def _widen(values: NDArray[np.int64] | NDArray[np.float32], k: int, fill: float) -> Tensor:  # [m, k]
    return torch.from_numpy(np.pad(values, ((0, 0), (0, k - values.shape[1])), constant_values=fill))
