"""Addressed randomness: uniform and Gumbel as they should be, and unrelated across every part of the address.

Seeds are fixed; a p-value below `ALARM` is a defect with a chance of one in ten thousand of a false alarm, per test,
at the moment the mixing function is changed.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from serving.spec.noise import Role, _to_unit, fresh_seed, gumbel, uniform
from tests.laws.chi_square import ALARM

CPU = torch.device("cpu")
N = 20_000


def draws(seeds: object, positions: object, role: Role = Role.ACCEPT) -> np.ndarray:
    return uniform(list(seeds), list(positions), role).numpy()  # type: ignore[call-overload]


# One part of the address runs, the others stand; small, neighbouring and huge numbers alike.
STREAMS = {
    "positions": lambda role: draws([7] * N, range(N), role),
    "seeds": lambda role: draws(range(N), [3] * N, role),
    "negative seeds": lambda role: draws(range(-N, 0), [3] * N, role),
    "seeds far apart": lambda role: draws([i << 40 for i in range(N)], [0] * N, role),
    "seeds and positions together": lambda role: draws(range(N), range(N), role),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("role", Role)
def test_uniform(stream: str, role: Role) -> None:
    u = STREAMS[stream](role)
    assert ((u > 0) & (u < 1)).all()
    assert stats.kstest(u, "uniform").pvalue > ALARM


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_independent(stream: str) -> None:
    """Pairs of adjacent draws fill the unit square evenly."""
    u = STREAMS[stream](Role.DRAFT)
    cells = (u[:-1] * 20).astype(int) * 20 + (u[1:] * 20).astype(int)
    assert stats.chisquare(np.bincount(cells[::2], minlength=400)).pvalue > ALARM


@pytest.mark.parametrize(("one", "other"), list(combinations(Role, 2)))
def test_roles_are_independent(one: Role, other: Role) -> None:
    a, b = (draws([11] * N, range(N), role) for role in (one, other))
    cells = (a * 20).astype(int) * 20 + (b * 20).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=400)).pvalue > ALARM


@pytest.mark.parametrize("step", [1, 2, 8, 1 << 32])
def test_seeds_that_differ_little_share_nothing(step: int) -> None:
    a, b = (draws([seed] * N, range(N)) for seed in (100, 100 + step))
    assert not np.isin(a, b).any()
    cells = (a * 20).astype(int) * 20 + (b * 20).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=400)).pvalue > ALARM


def test_no_two_addresses_share_a_draw() -> None:
    """Neither a neighbouring position in another role nor another seed."""
    found = [draws([seed] * 500, range(500), role) for seed in (*range(-5, 5), 1 << 62) for role in Role]
    assert len(np.unique(np.concatenate(found))) == 500 * 11 * len(Role)


def test_a_draw_depends_on_its_address_alone() -> None:
    together = uniform([1, 2, 3], [4, 5, 6], Role.BONUS)
    alone = torch.cat([uniform([seed], [position], Role.BONUS) for seed, position in ((1, 4), (2, 5), (3, 6))])
    assert torch.equal(together, alone)
    assert torch.equal(together.flip(0), uniform([3, 2, 1], [6, 5, 4], Role.BONUS))


def test_the_ends_of_the_range_stay_inside() -> None:
    extremes = _to_unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))  # as unsigned: least, largest, and the middle
    assert ((extremes > 0) & (extremes < 1)).all()
    assert torch.isfinite(-torch.log(-torch.log(extremes))).all()


def test_gumbel_has_its_mean_variance_and_distribution() -> None:
    g = gumbel(5, range(40), 2000, CPU).flatten().numpy()
    n = len(g)
    deviation = math.pi / math.sqrt(6)
    # Five standard errors; the fourth central moment of a Gumbel is 5.4 variances squared.
    assert abs(g.mean() - np.euler_gamma) < 5 * deviation / math.sqrt(n)
    assert abs(g.var() - deviation**2) < 5 * deviation**2 * math.sqrt(4.4 / n)
    assert stats.kstest(g, "gumbel_r").pvalue > ALARM


def test_gumbel_is_independent_across_ids_and_positions() -> None:
    u = np.exp(-np.exp(-gumbel(9, range(200), 400, CPU).numpy()))  # back to uniforms
    for a, b in ((u[:, ::2], u[:, 1::2]), (u[::2], u[1::2])):
        cells = (a * 20).astype(int) * 20 + (b * 20).astype(int)
        assert stats.chisquare(np.bincount(cells.flatten(), minlength=400)).pvalue > ALARM


def test_gumbel_of_an_id_is_the_same_in_any_width_and_beside_any_position() -> None:
    """A drafter with a smaller or wider vocabulary meets the very noise that the target will use."""
    wide = gumbel(3, [8, 9], 1000, CPU)
    assert torch.equal(gumbel(3, [9], 300, CPU)[0], wide[1, :300])
    ids = torch.tensor([0, 17, 299])
    assert torch.equal(gumbel(3, [8], 300, CPU)[0, ids], wide[0, ids])


def test_the_largest_of_log_p_and_gumbel_is_a_draw_from_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    picks = (p.log() + gumbel(1, range(N), 5, CPU)).argmax(-1)
    counts = torch.bincount(picks, minlength=5)
    assert counts[4] == 0
    assert stats.chisquare(counts[:4].numpy(), (p[:4].double() / p.double().sum()).numpy() * N).pvalue > ALARM


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(1000)}) == 1000
