"""Verification of chain drafts: which are kept, and which token follows them.

Two rules, both exact. *Rejection* (Leviathan et al. 2023; Chen et al. 2023): keep x with chance min(1, p/q), on a
rejection draw from norm((p - q)+), after a full run draw a bonus from p. *Coupling*: draft and target each pick with
the same noise (or greedily), a draft is kept while the picks agree, and what is emitted is the target's own pick.
Pure functions over padded batches; where the noise comes from is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """For each of b requests: drafts kept, and the recovered or bonus token that follows them."""

    accepted: Tensor  # [b] int64
    final: Tensor  # [b] int64


@dataclass(frozen=True)
class RoundNoise:
    """Uniforms of one round, in (0, 1); column j belongs to the j-th committed position from the round's start."""

    accept: Tensor  # [b, gamma] float64
    recover: Tensor  # [b, gamma + 1] float64, used at the rejected position
    bonus: Tensor  # [b, gamma + 1] float64, used after a full run


def verify_rejection(
    target_probs: Tensor,  # [b, gamma + 1, vocab] p after each row's filters; row j follows j drafts
    draft_probs: Tensor,  # [b, gamma, vocab] q that drew each draft (one-hot for a point mass)
    draft_ids: Tensor,  # [b, gamma]
    lengths: Tensor,  # [b] drafts that exist; the rest is padding
    noise: RoundNoise,
) -> Verdict:
    """Corrected rejection sampling, batched."""
    gamma = draft_ids.shape[1]
    p = target_probs[:, :gamma].gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1).double()
    q = draft_probs.gather(-1, draft_ids.unsqueeze(-1)).squeeze(-1).double()
    kept = noise.accept * q < p
    kept &= torch.arange(gamma, device=kept.device) < lengths[:, None]
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, _draw_final(target_probs, draft_probs, lengths, accepted, noise))


def _draw_final(
    target_probs: Tensor, draft_probs: Tensor, lengths: Tensor, accepted: Tensor, noise: RoundNoise
) -> Tensor:  # [b]
    """The token after the accepted run: recovered from norm((p - q)+), or a bonus from p."""
    batch = torch.arange(len(accepted), device=accepted.device)
    p = target_probs[batch, accepted]
    rejected = accepted < lengths
    if draft_probs.shape[1]:
        q = draft_probs[batch, accepted.clamp(max=draft_probs.shape[1] - 1)]
        residual = (p - q).clamp_(min=0)
        # Where p and q agree to the last bit nothing is left over; a rejection there has chance 0 up to rounding.
        use = rejected & (residual.sum(-1) > 0)
        p = torch.where(use[:, None], residual, p)
    recover, bonus = noise.recover[batch, accepted], noise.bonus[batch, accepted]
    return draw(p, torch.where(rejected, recover, bonus))


def verify_coupled(
    picks: Tensor,  # [b, gamma + 1] the target's own pick at each row
    draft_ids: Tensor,  # [b, gamma]
    lengths: Tensor,  # [b]
) -> Verdict:
    """Keeps drafts while they equal the target's picks."""
    gamma = draft_ids.shape[1]
    kept = (draft_ids == picks[:, :gamma]) & (torch.arange(gamma, device=picks.device) < lengths[:, None])
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, picks.gather(1, accepted[:, None]).squeeze(1))


def draw(probs: Tensor, noise: Tensor) -> Tensor:  # [b, vocab], [b] -> [b]
    """Inverse transform of unnormalised probabilities; a token of probability 0 is never drawn."""
    cumulative = probs.double().cumsum(-1)
    point = (noise.to(cumulative.device) * cumulative[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)
