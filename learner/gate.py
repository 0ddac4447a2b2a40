"""Whether a candidate replaces the champion: more tokens a second on the same requests, and no damage elsewhere.

Tokens a second are expected ones: the committed tokens over the rounds that each drafter would have taken, each round
at what it costs now at the request's present gamma. The bound on the gain comes from a paired bootstrap that draws
whole requests, because positions of one request are not independent. Sums only; seeded requests are left out, since
they accept by coupling. It promotes nothing itself and draws from its own seed, so a decision can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from learner.evaluator import Judged
from shared.config import GateConfig
from shared.intervals import Interval, student_tail

Pair = tuple[Sequence[Judged], Sequence[Judged]]  # candidate and champion on the same requests, in the same order
OfSums = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Decision:
    promote: bool
    reason: str  # a sentence with the numbers
    # Bounds are one-sided, at the gate's confidence.
    gain: Interval  # alpha of the candidate minus the champion's
    speedup: Interval  # tokens a second of the candidate over the champion's, minus 1: what is decided on
    requests: int
    alpha_candidate: float
    alpha_champion: float
    rate_candidate: float  # tokens a second of one request, or tokens a round where the costs are not known
    rate_champion: float
    probes: Mapping[str, float] = field(default_factory=dict)  # gain in alpha by probe


class Gate:
    def __init__(self, config: GateConfig, seed: int = 0) -> None:
        self._config, self._seed = config, seed

    def decide(
        self,
        candidate: Sequence[Judged],
        champion: Sequence[Judged],
        probes: Mapping[str, Pair] | None = None,
        *,
        round_s: Sequence[float] = (),
    ) -> Decision:
        """Promotes when the lower bound of the speedup exceeds `gate.min_gain` and every probe keeps its alpha.

        `round_s` are the seconds of a round at each request's gamma; without them all rounds cost the same.
        """
        counts = _counts(candidate, champion, round_s)  # [requests, 7]
        sums, resampled = counts.sum(0), self._resampled(counts)
        decision = Decision(
            promote=False,
            reason="",
            gain=self._bounded(_gains, counts, resampled),
            speedup=self._bounded(_speedups, counts, resampled),
            requests=len(counts),
            alpha_candidate=_ratio(sums[0], sums[1]),
            alpha_champion=_ratio(sums[2], sums[3]),
            rate_candidate=_ratio(sums[6], sums[4]),
            rate_champion=_ratio(sums[6], sums[5]),
            probes={name: float(_gains(_counts(*pair).sum(0))) for name, pair in (probes or {}).items()},
        )
        promote, reason = self._judge(decision, tested=sums[1], rate="tokens/s" if len(round_s) else "tokens a round")
        return replace(decision, promote=promote, reason=reason)

    def _judge(self, decision: Decision, *, tested: float, rate: str) -> tuple[bool, str]:
        config, speedup = self._config, decision.speedup
        if decision.requests < config.min_requests:
            return False, f"kept: {decision.requests} requests to judge on, gate.min_requests is {config.min_requests}"
        measured = (
            f"alpha {decision.alpha_champion:.3f} -> {decision.alpha_candidate:.3f} ({decision.gain.value:+.3f}), "
            f"{decision.rate_champion:.3g} -> {decision.rate_candidate:.3g} {rate} ({speedup.value:+.1%}, at least "
            f"{speedup.low:+.1%} with {config.confidence:.0%} confidence, {decision.requests} requests, "
            f"{tested:.0f} tested)"
        )
        if not speedup.low > config.min_gain:
            return False, f"kept: a gain above {config.min_gain:+.1%} is not proven, {measured}"
        probes = decision.probes
        worst = min(probes, key=lambda name: probes[name], default=None)
        if worst is not None and probes[worst] < -config.probe_loss:
            return False, (
                f"kept: the probe {worst} loses {-probes[worst]:.3f}, more than gate.probe_loss "
                f"{config.probe_loss:.3f}, though {measured}"
            )
        checked = f"; worst probe {worst} {probes[worst]:+.3f}" if worst is not None else ""
        return True, f"promoted: {measured}{checked}"

    def _resampled(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:  # [resamples, 7]
        """Sums over as many requests, drawn with replacement."""
        requests = max(len(counts), 1)
        draws = np.random.default_rng(self._seed).multinomial(
            len(counts), np.full(requests, 1 / requests), size=self._config.resamples
        )
        return np.asarray(draws[:, : len(counts)] @ counts)

    def _bounded(self, of_sums: OfSums, counts: NDArray[np.float64], resampled: NDArray[np.float64]) -> Interval:
        value = float(of_sums(counts.sum(0)))
        if len(counts) < 2:
            return Interval(value, -1.0, 1.0)
        tail = student_tail(self._config.confidence, len(counts))
        low, high = np.quantile(of_sums(resampled), [tail, 1 - tail])
        return Interval(value, float(low), float(high))


def _counts(
    candidate: Sequence[Judged], champion: Sequence[Judged], round_s: Sequence[float] = ()
) -> NDArray[np.float64]:
    """[requests, 7]: accepted and tested of the candidate, then of the champion; seconds of both; tokens."""
    assert [j.id for j in candidate] == [j.id for j in champion], "the two are judged on the same requests"
    rows = [
        (
            mine.accepted,
            mine.tested,
            theirs.accepted,
            theirs.tested,
            mine.steps * seconds,
            theirs.steps * seconds,
            mine.positions,
        )
        for mine, theirs, seconds in zip(candidate, champion, round_s or [1.0] * len(candidate), strict=True)
        if mine.positions and not mine.seeded
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 7)


def _gains(sums: NDArray[np.float64]) -> NDArray[np.float64]:  # [..., 7] -> [...]
    """Differences of alpha; nothing tested counts as nothing accepted."""
    tested = np.where(sums[..., 1:4:2] > 0, sums[..., 1:4:2], 1.0)
    alphas = sums[..., 0:4:2] / tested  # [..., 2]
    return np.asarray(alphas[..., 0] - alphas[..., 1])


def _speedups(sums: NDArray[np.float64]) -> NDArray[np.float64]:  # [..., 7] -> [...]
    """The same tokens in fewer seconds."""
    mine = sums[..., 4]
    return np.asarray(np.where(mine > 0, sums[..., 5] / np.where(mine > 0, mine, 1.0), 1.0) - 1.0)


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under else 0.0
