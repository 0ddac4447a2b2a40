"""Estimates with bounds, and bounds of ratios over few clusters. Pure numbers; what a cluster is, the caller says."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Interval:
    """An estimate with its bounds; at which confidence, and whether each is one-sided, who computes it says."""

    value: float
    low: float
    high: float


def student_quantile(confidence: float, clusters: int) -> float:
    """Student's quantile with clusters - 1 degrees of freedom, by Cornish and Fisher; 2 clusters at least."""
    z, df = NormalDist().inv_cdf(confidence), clusters - 1
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def student_tail(confidence: float, clusters: int) -> float:
    """The bootstrap's quantile for a one-sided bound.

    A plain percentile is too narrow for few clusters: it misses the factor sqrt(n / (n - 1)) and Student's wider tail
    (the expanded percentile interval of Hesterberg 2015, section 3.3).
    """
    return NormalDist().cdf(-student_quantile(confidence, clusters) * (clusters / (clusters - 1)) ** 0.5)
