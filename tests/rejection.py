"""Rejection sampling over padded batches, out of the product's two halves: what the laws' tables are tried with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serving.spec.verify import Verdict, final_tokens, keeps


@dataclass(frozen=True)
class RoundNoise:
    """Uniforms of one round, in (0, 1); column j belongs to the j-th committed position from the round's start."""

    accept: Tensor  # [b, gamma] float64
    recover: Tensor  # [b, gamma + 1] float64, used at the rejected position
    bonus: Tensor  # [b, gamma + 1] float64, used after a full run


def verify_rejection(
    target_probs: Tensor,  # [b, gamma + 1, vocab] p; row j follows j drafts
    draft_probs: Tensor,  # [b, gamma, vocab] q that drew each draft (one-hot for a point mass)
    draft_ids: Tensor,  # [b, gamma]
    lengths: Tensor,  # [b] drafts that exist; the rest is padding
    noise: RoundNoise,
) -> Verdict:
    """A round of each request."""
    batch, (count, gamma) = torch.arange(len(draft_ids)), draft_ids.shape
    p = target_probs[:, :gamma].gather(-1, draft_ids.unsqueeze(-1)).flatten()
    q = draft_probs.gather(-1, draft_ids.unsqueeze(-1)).flatten()
    kept = keeps(p, q, noise.accept.flatten()).view(count, gamma)
    kept &= torch.arange(gamma) < lengths[:, None]
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    rejected = accepted < lengths
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))  # behind the last draft nothing can be rejected
    q_final = torch.where(rejected[:, None], padded[batch, accepted], 0.0)
    due = torch.where(rejected, noise.recover[batch, accepted], noise.bonus[batch, accepted])
    return Verdict(accepted, final_tokens(target_probs[batch, accepted], q_final, due))
