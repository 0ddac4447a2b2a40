"""Verification of chain drafts: which are kept, and which token follows them.

Two rules, both exact. *Rejection* (Leviathan et al. 2023; Chen et al. 2023): keep x with chance min(1, p/q), on a
rejection draw from norm((p - q)+), after a full run draw a bonus from p. *Coupling*: draft and target each pick with
the same noise (or greedily), a draft is kept while the picks agree, and what is emitted is the target's own pick.
Pure functions over batches; where the noise comes from is the caller's business.
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


def keeps(
    p: Tensor,  # [drafts] target's probability of each draft, after the request's processing
    q: Tensor,  # [drafts] of the distribution that drew it (1 for a point mass)
    noise: Tensor,  # [drafts] float64 in (0, 1), a uniform of its own for each
) -> Tensor:  # [drafts] bool
    """True with chance min(1, p/q): the draft is kept if all before it were."""
    return noise * q.double() < p.double()


def final_tokens(
    p: Tensor,  # [b, vocab] at the row behind each request's accepted run
    q: Tensor,  # [b, vocab] that drew the rejected draft; 0 where none was rejected
    noise: Tensor,  # [b] float64: of the role that is due, recover or bonus
) -> Tensor:  # [b]
    """The token after the accepted run: recovered from norm((p - q)+), or a bonus from p."""
    residual = (p - q).clamp_(min=0)
    # Where p and q agree to the last bit nothing is left over; a rejection there has chance 0 up to rounding.
    return draw(torch.where(residual.sum(-1, keepdim=True) > 0, residual, p), noise)


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
