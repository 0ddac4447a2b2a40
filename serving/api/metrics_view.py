"""Counters of finished requests as the `metrics` object of an answer.

Field names and definitions are vLLM's per-request acceptance metrics: `mean_acceptance_length` is
1 + accepted / speculation steps, `draft_acceptance_rate` accepted / drafted, and both histograms exclude the token that
the target itself adds in each step. `alpha`, `tested` and `drafter_version` are ours. A ratio without a denominator is
null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from serving.engine.events import RequestStats


def metrics_of(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """The counters of all choices of one answer, summed."""
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    tested = sum(one.tested for one in stats)
    steps = sum(one.num_spec_steps for one in stats)
    accepted_a_step = _ratio(accepted, steps)
    lengths = sorted({length for one in stats for length in one.by_draft_length})
    most = max((one.num_spec_tokens for one in stats), default=0)
    # One bucket for each number of drafts that a step might have accepted, as vLLM's readers demand.
    histogram = _sum([[0] * (most + 1), *(one.accepted_lengths for one in stats)])
    versions = [one.drafter_version for one in stats if one.drafter_version]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": None if accepted_a_step is None else 1.0 + accepted_a_step,
            "draft_acceptance_rate": _ratio(accepted, drafted),
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(length): _sum(one.by_draft_length.get(length, ()) for one in stats) for length in lengths
            },
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": most,
            "alpha": _ratio(accepted, tested),
            "tested": tested,
            "drafter_version": versions[-1] if versions else "",
        }
    }


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _sum(histograms: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
