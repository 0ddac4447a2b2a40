"""How rows of logits become tokens, many requests at a time: the filters by groups, and the pick with shared noise.

Draft and target go through these very functions (law 3), whatever vocabulary their columns stand for. A row's result
depends on nothing but that row, its request's parameters and its address.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.spec.noise import coupled_keys, gumbel_of
from shared.sampling import filtered_probs, largest
from shared.trace import Sampling

_SPARSE = 4  # noise is made for single ids where at most one in so many survives the filters


def probs_by_rows(logits: Tensor, samplings: Seq[Sampling]) -> Tensor:  # [rows, width], one sampling for each row
    """Each row after its own temperature and filters; rows of the same ones are filtered together."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), []).append(row)
    if len(groups) == 1:
        return filtered_probs(logits, samplings[0])
    probs = torch.empty_like(logits, dtype=torch.float32)
    for rows in groups.values():
        probs[rows] = filtered_probs(logits[rows], samplings[rows[0]])
    return probs


def coupled_picks(
    probs: Tensor,  # [rows, width]
    seeds: Seq[int],
    positions: Seq[int],
    ids: Tensor | None = None,  # [width] target id of each column; None: the column itself
) -> Tensor:  # [rows] columns
    """Gumbel-max with the noise of each row's (seed, position) and each column's target id."""
    keys = coupled_keys(seeds, positions, probs.device)
    rows, columns = probs.nonzero(as_tuple=True)
    if len(rows) * _SPARSE > probs.numel():
        every = torch.arange(probs.shape[1], device=probs.device) if ids is None else ids
        return largest(probs.log() + gumbel_of(keys[:, None], every))
    scores = probs.new_full(probs.shape, float("-inf"), dtype=torch.float64)
    noise = gumbel_of(keys[rows], columns if ids is None else ids[columns])
    scores[rows, columns] = probs[rows, columns].log() + noise
    return largest(scores)
