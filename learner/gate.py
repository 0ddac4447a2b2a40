"""Whether a candidate replaces the champion: proof on the same requests, and no damage on probes of other domains.

The bound on the gain comes from a paired bootstrap that draws whole requests, because positions of one request are not
independent. Sums only; seeded requests are left out, since they accept by coupling. It promotes nothing itself and
knows nothing of models. It draws from its own seed, so a decision can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from learner.evaluator import Judged
from shared.config import GateConfig

Pair = tuple[Sequence[Judged], Sequence[Judged]]  # candidate and champion on the same requests, in the same order


@dataclass(frozen=True)
class Decision:
    promote: bool
    reason: str  # a sentence with the numbers
    gain: float  # alpha of the candidate minus the champion's
    ci_low: float  # one-sided lower bound of the gain at the gate's confidence
    ci_high: float  # upper bound, likewise one-sided
    requests: int
    alpha_candidate: float
    alpha_champion: float
    probes: Mapping[str, float] = field(default_factory=dict)  # gain by probe


class Gate:
    def __init__(self, config: GateConfig, seed: int = 0) -> None:
        self._config, self._seed = config, seed

    def decide(
        self, candidate: Sequence[Judged], champion: Sequence[Judged], probes: Mapping[str, Pair] | None = None
    ) -> Decision:
        """Promotes when the lower bound of the gain exceeds `gate.min_gain` and every probe keeps its alpha."""
        counts = _counts(candidate, champion)  # [requests, 4]
        requests = len(counts)
        lost = {name: _gain(_counts(*pair)) for name, pair in (probes or {}).items()}
        sums = counts.sum(0)
        gain, low, high = self._interval(counts)
        promote, reason = self._judge(requests, sums, (gain, low), lost)
        return Decision(
            promote=promote,
            reason=reason,
            gain=gain,
            ci_low=low,
            ci_high=high,
            requests=requests,
            alpha_candidate=_ratio(sums[0], sums[1]),
            alpha_champion=_ratio(sums[2], sums[3]),
            probes=lost,
        )

    def _judge(
        self, requests: int, sums: NDArray[np.float64], bounds: tuple[float, float], probes: Mapping[str, float]
    ) -> tuple[bool, str]:
        config, (gain, low) = self._config, bounds
        if requests < config.min_requests:
            return False, f"kept: {requests} requests to judge on, gate.min_requests is {config.min_requests}"
        measured = (
            f"alpha {_ratio(sums[2], sums[3]):.3f} -> {_ratio(sums[0], sums[1]):.3f} ({gain:+.3f}, at least "
            f"{low:+.3f} with {config.confidence:.0%} confidence, {requests} requests, {sums[1]:.0f} tested)"
        )
        if not low > config.min_gain:
            return False, f"kept: a gain above {config.min_gain:+.3f} is not proven, {measured}"
        worst = min(probes, key=lambda name: probes[name], default=None)
        if worst is not None and probes[worst] < -config.probe_loss:
            return False, (
                f"kept: the probe {worst} loses {-probes[worst]:.3f}, more than gate.probe_loss "
                f"{config.probe_loss:.3f}, though {measured}"
            )
        checked = f"; worst probe {worst} {probes[worst]:+.3f}" if worst is not None else ""
        return True, f"promoted: {measured}{checked}"

    def _interval(self, counts: NDArray[np.float64]) -> tuple[float, float, float]:  # gain, low, high
        requests = len(counts)
        gain = _gain(counts)
        if requests < 2:
            return gain, -1.0, 1.0
        rng = np.random.default_rng(self._seed)
        draws = rng.multinomial(requests, np.full(requests, 1 / requests), size=self._config.resamples)
        gains = _gains(draws @ counts)  # [resamples]
        tail = _tail(self._config.confidence, requests)
        low, high = np.quantile(gains, [tail, 1 - tail])
        return gain, float(low), float(high)


def _counts(candidate: Sequence[Judged], champion: Sequence[Judged]) -> NDArray[np.float64]:
    """[requests, 4]: accepted and tested of the candidate, then of the champion."""
    assert [j.id for j in candidate] == [j.id for j in champion], "the two are judged on the same requests"
    rows = [
        (mine.accepted, mine.tested, theirs.accepted, theirs.tested)
        for mine, theirs in zip(candidate, champion, strict=True)
        if mine.positions and not mine.seeded
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _gains(sums: NDArray[np.float64]) -> NDArray[np.float64]:  # [n, 4] -> [n]
    """Differences of alpha; nothing tested counts as nothing accepted."""
    tested = np.where(sums[:, 1::2] > 0, sums[:, 1::2], 1.0)
    alphas = sums[:, 0::2] / tested  # [n, 2]
    return np.asarray(alphas[:, 0] - alphas[:, 1])


def _gain(counts: NDArray[np.float64]) -> float:  # [requests, 4]
    return float(_gains(counts.sum(0, keepdims=True))[0])


def _ratio(accepted: float, tested: float) -> float:
    return float(accepted / tested) if tested else 0.0


def _tail(confidence: float, requests: int) -> float:
    """The bootstrap's quantile for a one-sided bound.

    A plain percentile is too narrow for few clusters: it misses the factor sqrt(n / (n - 1)) and Student's wider tail
    (the expanded percentile interval of Hesterberg 2015, section 3.3). Student's quantile by Cornish and Fisher.
    """
    normal, df = NormalDist(), requests - 1
    z = normal.inv_cdf(confidence)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return normal.cdf(-t * (requests / df) ** 0.5)
