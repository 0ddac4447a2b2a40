"""Percentiles of samples, by linear interpolation between the two nearest: what numpy and most load generators do."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = (50, 90, 95, 99)


def percentile(samples: Sequence[float], share: float) -> float:
    """Of sorted samples; `share` is 0..1. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    place = share * (len(samples) - 1)
    low = int(place)
    high = min(low + 1, len(samples) - 1)
    return samples[low] + (place - low) * (samples[high] - samples[low])


def summary(samples: Sequence[float]) -> dict[str, float]:
    """count, mean, min, max and the shown percentiles; only a count of 0 without samples."""
    if not samples:
        return {"count": 0}
    ordered = sorted(samples)
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        **{f"p{number}": percentile(ordered, number / 100) for number in SHOWN},
        "max": ordered[-1],
    }
