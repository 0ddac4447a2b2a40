"""What speculation could have gained with its own α and its own step costs, and what share of that it did gain.

With α the chance that a tested draft is accepted, a step that drafts γ tokens emits E(α, γ) = (1 − α^(γ+1)) / (1 − α)
on average (Leviathan et al. 2023, equation 1). Divided by what the step's forwards cost, in forwards of plain decoding,
that is the speedup that α and the models allow. The measured one is lower by everything that is no forward, and by as
much as acceptances are unlike independent draws. Only steps that read no prompt are counted on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.bench_line_up import Contender, plain_of
from ops.bench_measure import Measure
from ops.bench_ratios import CONFIDENCE, draws, of, pair_grid, spots
from ops.bench_run import Result


@dataclass(frozen=True)
class Attainable:
    """Of one drafting contender over our plain decoding in the same weight format."""

    contender: str
    plain: str
    batch: int
    domain: str
    alpha: float
    tokens_per_step: float  # measured
    expected_tokens_per_step: float  # E(α, γ) over the drafted lengths as they were
    cost: float  # forwards of a step, in those of a plain step
    allowed: float  # expected tokens over cost
    measured: float  # speedup of decoding
    share: float  # measured over allowed, with its 95 % interval
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class _Sums:
    """Numerators and denominators, added up over pairs; index 0 of each is the drafting one's, 1 the plain one's."""

    steps: NDArray[np.float64]  # [2, ...]
    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    model_s: NDArray[np.float64]
    accepted: NDArray[np.float64]  # [...]
    tested: NDArray[np.float64]
    lengths: Mapping[int, NDArray[np.float64]]  # drafted -> [...] steps


def expected_tokens(alpha: float | NDArray[np.float64], gamma: int) -> NDArray[np.float64]:
    """E(α, γ), by its sum 1 + α + ... + α^γ, which has no pole at α = 1."""
    powers = np.arange(gamma + 1)
    return np.asarray((np.asarray(alpha)[..., None] ** powers).sum(-1))


def attainable(results: Sequence[Result], contenders: Sequence[Contender], *, seed: int) -> list[Attainable]:
    """One for each contender of ours that drafts, batch and domain; none where nothing was drafted."""
    found = []
    for contender in contenders:
        plain = plain_of(contender, contenders)
        if plain is None:
            continue
        for batch, domain in spots(results):
            above, below = (of(results, name, batch, domain) for name in (contender.name, plain.name))
            entry = _entry(contender.name, plain.name, batch, domain, above, below, seed)
            if entry is not None:
                found.append(entry)
    return found


def _entry(
    name: str, plain: str, batch: int, domain: str, above: Sequence[Result], below: Sequence[Result], seed: int
) -> Attainable | None:
    measures: list[tuple[Measure, Measure]] = []

    def number(a: Result, b: Result) -> float:
        measures.append((a.measure, b.measure))
        return len(measures) - 1

    grid = pair_grid(above, below, number)
    if grid is None or not sum(a.decode.tested for a, _ in measures):
        return None
    indices = grid.astype(int)
    whole = _sums(measures, indices.reshape(1, -1))
    drawn = indices[draws(len(indices), indices.shape[1], seed)].reshape(-1, indices.size)
    alpha, expected, cost, measured, share = (float(part[0]) for part in _parts(whole))
    shares = _parts(_sums(measures, drawn))[-1]
    low, high = np.nanquantile(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Attainable(
        contender=name,
        plain=plain,
        batch=batch,
        domain=domain,
        alpha=alpha,
        tokens_per_step=float(whole.tokens[0, 0] / whole.steps[0, 0]),
        expected_tokens_per_step=expected,
        cost=cost,
        allowed=expected / cost,
        measured=measured,
        share=share,
        low=float(low),
        high=float(high),
        pairs=indices.size,
    )


def _sums(measures: Sequence[tuple[Measure, Measure]], indices: NDArray[np.int64]) -> _Sums:  # indices [draws, pairs]
    def two(name: str) -> NDArray[np.float64]:
        values = np.array([[getattr(m.decode, name) for m in pair] for pair in measures], dtype=np.float64)
        return np.stack([values[:, side][indices].sum(1) for side in (0, 1)])

    def one(values: Sequence[float]) -> NDArray[np.float64]:
        return np.asarray(np.array(values, dtype=np.float64)[indices].sum(1))

    lengths = sorted({int(length) for a, _ in measures for length in a.drafted_lengths})
    return _Sums(
        steps=two("steps"),
        tokens=two("tokens"),
        seconds=two("seconds"),
        model_s=two("model_s"),
        accepted=one([a.decode.accepted for a, _ in measures]),
        tested=one([a.decode.tested for a, _ in measures]),
        lengths={length: one([_decoding_steps(a, length) for a, _ in measures]) for length in lengths},
    )


def _decoding_steps(measure: Measure, length: int) -> int:
    """Steps of this drafted length; those of length 0 without the ones that came with a prompt."""
    steps = measure.drafted_lengths.get(str(length), 0)
    return steps if length else max(steps - (measure.steps - measure.decode.steps), 0)


def _parts(sums: _Sums) -> tuple[NDArray[np.float64], ...]:
    """α, E, cost, measured speedup and its share of the allowed one, each [draws]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha = sums.accepted / sums.tested
        total = sum(sums.lengths.values())
        expected = sum(count * expected_tokens(alpha, length) for length, count in sums.lengths.items()) / total
        cost = (sums.model_s[0] / sums.steps[0]) / (sums.model_s[1] / sums.steps[1])
        measured = (sums.tokens[0] / sums.seconds[0]) / (sums.tokens[1] / sums.seconds[1])
        return alpha, np.asarray(expected), cost, measured, measured / (expected / cost)
