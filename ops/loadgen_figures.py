"""From samples to figures: percentiles, throughput, goodput under a latency goal, and counts of drafts.

The first requests, sent to a server that is still warming up, are left out everywhere but in their count. Throughput
is over the time from the first measured request's sending to the last measured token. Counters stay counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.loadgen_request import Sample
from ops.percentiles import summary
from shared.errors import ConfigError

_GOALS = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Goal:
    """Most seconds; None: any."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def met(self, sample: Sample) -> bool:
        """A failed request meets no goal."""
        if sample.error:
            return False
        seen = {"ttft": sample.ttft, "itl": sample.itl, "e2e": sample.latency}
        return all(
            most is None or (value := seen[name]) is None or value <= most for name, most in asdict(self).items()
        )


def read_goal(text: str | None) -> Goal:
    """`ttft=0.5,itl=0.1,e2e=10`. Raises ConfigError."""
    if text is None:
        return Goal()
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if name.strip() not in _GOALS or not 0 < value < float("inf"):
            raise ConfigError("--slo", f"{part!r} is no goal", "Write ttft=0.5,itl=0.1 or e2e=10, in seconds")
        values[name.strip()] = value
    return Goal(**values)


def figures(samples: Sequence[Sample], *, warm_up: int, goal: Goal) -> dict[str, Any]:
    """Everything that is shown, as plain numbers: seconds, tokens, counts; rates are a second."""
    measured = [sample for sample in samples if sample.number >= warm_up]
    good = [sample for sample in measured if not sample.error]
    span = max((s.last_at for s in good), default=0.0) - min((s.sent_at for s in measured), default=0.0)
    span = max(span, 0.0)
    met = sum(goal.met(sample) for sample in measured)
    tokens = sum(sample.tokens for sample in good)
    return {
        "requests": {
            "sent": len(samples),
            "warm_up": len(samples) - len(measured),
            "measured": len(measured),
            "failed": len(measured) - len(good),
            "errors": dict(Counter(sample.error for sample in measured if sample.error).most_common(10)),
        },
        "seconds": span,
        "tokens": {
            "output": tokens,
            "prompt": sum(sample.prompt_tokens for sample in good),
            "counted_by_server": all(sample.counted for sample in good),
        },
        "rates": {
            "requests": _rate(len(good), span),
            "output_tokens": _rate(tokens, span),
            "good_requests": _rate(met, span),
        },
        "goal": {**asdict(goal), "met": met, "of": len(measured)},
        "ttft": summary([sample.ttft for sample in good]),
        "itl": summary([sample.itl for sample in good if sample.itl is not None]),
        "e2e": summary([sample.latency for sample in good]),
        "gap": summary([gap for sample in good for gap in sample.gaps]),
        "late": summary([sample.sent_at - sample.due_at for sample in measured]),
        "drafts": _drafts(good),
        "domains": {
            domain: _drafts([sample for sample in good if sample.domain == domain])
            for domain in dict.fromkeys(sample.domain for sample in good)
        },
    }


def _drafts(samples: Sequence[Sample]) -> dict[str, Any]:
    tested = [sample for sample in samples if sample.tested]
    return {
        "requests": len(tested),
        "accepted": sum(sample.accepted for sample in tested),
        "tested": sum(sample.tested for sample in tested),
        "drafted": sum(sample.drafted for sample in tested),
        "rounds": sum(sample.rounds for sample in tested),
        "versions": sorted({sample.version for sample in tested if sample.version}),
        "alpha_by_request": summary([sample.accepted / sample.tested for sample in tested]),
    }


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
