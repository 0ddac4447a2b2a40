"""Randomness with an address: every draw is a pure function of (request seed, position, role).

No generator is kept, so a draw does not depend on what was drawn before, beside it, or in another process. Seeds are
64-bit; the mixing function is splitmix64's finaliser (Steele, Lea and Flood 2014), computed on signed integers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROLES = 8  # addresses reserved a position


class Role(IntEnum):
    """What a draw decides; no two roles share a stream, but for COUPLED, which draft and target share on purpose."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3
    COUPLED = 4


def fresh_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbits(63)


def uniform(seeds: Sequence[int], positions: Sequence[int], role: Role) -> Tensor:  # [n] float64 in (0, 1)
    """One uniform for each (seed, position)."""
    return _to_unit(_keys(seeds, positions, role))


def gumbel(seed: int, positions: Sequence[int], width: int, device: torch.device) -> Tensor:  # [positions, width]
    """Standard Gumbel noise for every vocabulary id at each position, the same for draft and target."""
    return gumbel_of(
        coupled_keys([seed] * len(positions), positions, device)[:, None], torch.arange(width, device=device)
    )


def coupled_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:  # [n] int64
    """What `gumbel_of` needs of each (seed, position)."""
    return _keys(seeds, positions, Role.COUPLED).to(device)


def gumbel_of(keys: Tensor, ids: Tensor) -> Tensor:  # broadcast against each other; float64
    """Standard Gumbel noise of these vocabulary ids alone: no id's noise depends on which others are asked for."""
    return -torch.log(-torch.log(_to_unit(_mix(keys + (ids + 1) * _signed(_GOLDEN)))))


def _keys(seeds: Sequence[int], positions: Sequence[int], role: Role) -> Tensor:  # [n] int64
    addresses = [
        _signed(seed + _GOLDEN * (position * _ROLES + role + 1))
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return _mix(_mix(torch.tensor(addresses, dtype=torch.int64)))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed integer."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def _to_unit(x: Tensor) -> Tensor:
    """52 bits and a half: with one bit more the largest would round to 1."""
    return (_shift(x, 12).double() + 0.5) * 2.0**-52
