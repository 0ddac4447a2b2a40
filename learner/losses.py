"""Distances between the target's stored top-k and a drafter's distribution, row by row.

Pure functions. p is the target's raw distribution (before temperature and filters), known on k ids. For a drafter over
the full vocabulary everything else is one residual bucket. For a head, p is restricted to the draft vocabulary and
renormalised, and what lies outside it is reported as lost: no training can win it back.
All losses are sums over the buckets: k known ids and the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["forward_kl", "reverse_kl", "jsd", "tv"]
_LEAST = 1e-6  # floor of a bucket's probability inside a logarithm


@dataclass(frozen=True)
class RowTargets:
    """p on the buckets of each row. Columns of ids that the drafter lacks are -1 and hold no probability."""

    columns: Tensor  # [m, k] column of the drafter's logits, or -1
    probs: Tensor  # [m, k] restricted and renormalised
    rest: Tensor  # [m] probability of everything that is not in `columns`
    kept: Tensor  # [m] raw mass that `probs` and `rest` were before renormalising; 1 - kept is lost

    def take(self, rows: Tensor) -> RowTargets:
        return RowTargets(self.columns[rows], self.probs[rows], self.rest[rows], self.kept[rows])


@dataclass(frozen=True)
class RowLosses:
    loss: Tensor  # [m]
    overlap: Tensor  # [m] sum of min(p, q) over the stored ids, raw p: a lower bound of acceptance at temperature 1


def row_targets(
    topk_ids: Tensor,  # [m, k] target ids, -1 fills
    topk_logprobs: Tensor,  # [m, k] raw, -inf fills
    column_of: Tensor | None,  # [vocab] column of each target id, -1: outside; None: columns are target ids
) -> RowTargets:
    """A row of which nothing is in the draft vocabulary has kept = 0 and zeros everywhere."""
    raw = topk_logprobs.float().exp()
    full = column_of is None
    columns = topk_ids if column_of is None else column_of[topk_ids.clamp_min(0)]
    columns = columns.masked_fill(topk_ids < 0, -1)
    probs = raw.masked_fill(columns < 0, 0.0)
    rest = (1.0 - raw.sum(1)).clamp_min(0.0) if full else torch.zeros_like(raw[:, 0])
    kept = probs.sum(1) + rest
    scale = kept.clamp_min(_LEAST)
    return RowTargets(columns, probs / scale[:, None], rest / scale, kept)


def distil(logits: Tensor, targets: RowTargets, kind: LossKind) -> RowLosses:  # logits [m, vocab]
    """The distance of q = softmax(logits) from p, in nats (tv: in probability)."""
    logits = logits.float()
    inside = targets.columns >= 0
    log_q = logits.gather(1, targets.columns.clamp_min(0)) - logits.logsumexp(1, keepdim=True)  # [m, k]
    q = log_q.exp().masked_fill(~inside, 0.0)
    q_rest = (1.0 - q.sum(1)).clamp_min(_LEAST)  # [m]
    loss = _DISTANCES[kind](
        torch.cat([targets.probs, targets.rest[:, None]], dim=1),
        torch.cat([q, q_rest[:, None]], dim=1),
        torch.cat([log_q.masked_fill(~inside, 0.0), q_rest.log()[:, None]], dim=1),
    ).sum(1)
    raw = targets.probs * targets.kept[:, None]
    return RowLosses(loss, torch.minimum(raw, q.detach()).sum(1))


# Each takes p, q and log q on the buckets, [m, k + 1], and returns the terms of the sum, likewise.


def _forward_kl(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    return torch.xlogy(p, p) - p * log_q


def _reverse_kl(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    return q * (log_q - p.clamp_min(_LEAST).log())


def _jsd(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    log_mean = ((p + q) / 2).clamp_min(_LEAST).log()
    return ((torch.xlogy(p, p) - p * log_mean) + q * (log_q - log_mean)) / 2


def _tv(p: Tensor, q: Tensor, log_q: Tensor) -> Tensor:
    return (p - q).abs() / 2


_DISTANCES = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "tv": _tv}
