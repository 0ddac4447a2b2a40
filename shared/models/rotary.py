"""Rotary position embedding with one multiplication (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

Models that rotate halves pair dimension i with i + dim/2. Here the two stand side by side (`pair_order`), so that a
head is a row of complex numbers and a rotation is their product with e^(i angle). Scores do not change when queries
and keys are permuted alike. Angles come from the model's own module, so every scaling is honoured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [n] -> cos, sin [n, dim / 2], scaled


class RotaryTable:
    """Factors of all positions below `limit`, computed when they are first needed."""

    def __init__(self, angles: Angles, limit: int) -> None:
        self._angles, self._limit = angles, limit
        self._table: Tensor | None = None  # [known, 1, dim / 2] complex64

    def at(self, positions: Tensor, longest: int) -> Tensor:  # [n] below `longest` -> [n, 1, dim / 2] complex64
        table = self._table
        if table is None or longest > len(table):
            known = min(max(longest, 1024, 0 if table is None else 2 * len(table)), max(self._limit, longest))
            cos, sin = self._angles(torch.arange(known, device=positions.device))
            table = self._table = torch.complex(cos.float(), sin.float()).unsqueeze(1)
        return table.index_select(0, positions)


def pair_order(dim: int) -> Tensor:  # [dim]
    """Where each dimension of a paired head stood: 0, dim/2, 1, dim/2 + 1, ..."""
    return torch.arange(dim).view(2, dim // 2).T.flatten()


def rotate_(x: Tensor, factors: Tensor) -> None:  # [tokens, heads, dim] paired, [tokens, 1, dim / 2]
    """In place, in float32."""
    tokens, heads, dim = x.shape
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(tokens, heads, dim // 2, 2)).mul_(factors)
        return
    turned = torch.view_as_complex(x.float().view(tokens, heads, dim // 2, 2)).mul_(factors)
    x.copy_(torch.view_as_real(turned).view(tokens, heads, dim))
