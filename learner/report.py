"""What decisions and windows look like in MLflow. Pure functions: numbers in, entries out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from learner.attempt import Attempt
from learner.lineage import tenants_of
from learner.registry import AttemptEntry
from learner.schedule import Outcome
from learner.watch import Verdict, Watching
from shared.config import Config
from shared.store import Champion


def attempt_entry(attempt: Attempt, outcome: Outcome, reason: str, why: str, config: Config) -> AttemptEntry:
    """`why` it was made, and the `reason` of its outcome."""
    decision, report, learner = attempt.decision, attempt.report, config.learner
    metrics = {
        "train/loss_first": report.loss_first,
        "train/loss_last": report.loss_last,
        "train/tokens": report.tokens,
        "train/seconds": report.seconds,
        "train/lost_alpha": report.lost,  # target probability outside the draft vocabulary
        "gate/alpha_before": decision.alpha_champion,
        "gate/alpha_after": decision.alpha_candidate,
        "gate/gain": decision.gain.value,
        "gate/gain_low": decision.gain.low,
        "gate/gain_high": decision.gain.high,
        "gate/rate_before": decision.rate_champion,
        "gate/rate_after": decision.rate_candidate,
        "gate/speedup": decision.speedup.value,
        "gate/speedup_low": decision.speedup.low,
        "gate/speedup_high": decision.speedup.high,
        "gate/requests": decision.requests,
        "gate/promoted": outcome == "promoted",
        **{f"probes/{domain}": gain for domain, gain in decision.probes.items()},
        **{f"train/overlap_{depth}": overlap for depth, overlap in enumerate(report.overlap_last, start=1)},
    }
    params = {
        "parent": attempt.parent,
        "focus": ", ".join(attempt.focus) or "whatever has arrived",
        "requests": attempt.requests,
        "trained_to": attempt.snapshot,
        "window_from": attempt.window[0],
        "window_to": attempt.window[1],
        "lora_rank": learner.lora_rank,
        "lora_alpha": learner.lora_alpha,
        "learning_rate": learner.learning_rate,
        "loss": learner.loss,
        "replay_share": learner.replay_share,
    }
    tags = {
        "redraft.decision": outcome,
        "redraft.reason": reason,
        "redraft.why": why,
        "redraft.candidate": attempt.artifact.manifest.version,
        "mlflow.note.content": reason,
    }
    return AttemptEntry(
        name=f"attempt {attempt.number}: {outcome}",
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        params=params,
        metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        tags=tags,
        losses=tuple(loss for loss in report.losses if math.isfinite(loss)),
    )


def watch_entry(watching: Watching, verdict: Verdict, now: float) -> AttemptEntry:
    """How the watch of a new version ended."""
    pointer = watching.pointer
    return AttemptEntry(
        name=f"watch {pointer.version} (no. {pointer.number}): {verdict.outcome}",
        started_at=watching.since,
        ended_at=now,
        params={"version": pointer.version, "against": watching.against, "canary": watching.canary or "all replicas"},
        metrics={f"watch/{name}": value for name, value in verdict.numbers.items() if math.isfinite(value)},
        tags={
            "redraft.decision": verdict.outcome,
            "redraft.reason": verdict.reason,
            "redraft.candidate": pointer.version,
            "mlflow.note.content": verdict.reason,
        },
        kind="watch",
    )


def order_entry(what: str, pointer: Champion, reason: str, now: float) -> AttemptEntry:
    """What a person has ordered."""
    said = f"{what} by an operator: {reason}"
    return AttemptEntry(
        name=f"{what} {pointer.version} (no. {pointer.number}) at {now:.0f}",
        started_at=now,
        ended_at=now,
        params={"version": pointer.version},
        metrics={},
        tags={
            "redraft.decision": what,
            "redraft.reason": said,
            "redraft.candidate": pointer.version,
            "mlflow.note.content": said,
        },
        kind="order",
    )


def version_facts(attempt: Attempt) -> dict[str, Any]:
    """What is kept with a promoted version."""
    return {
        "parent": attempt.parent,
        "attempt": attempt.number,
        "reason": attempt.decision.reason,
        "trained_to": attempt.snapshot,
        "tenants": ", ".join(sorted(tenants_of(attempt.artifact.manifest))),
        **attempt.artifact.manifest.metrics,
    }


def window_values(
    values: Mapping[str, float], drift: Mapping[str, float], number: int, measured: Mapping[str, tuple[float, ...]]
) -> dict[str, float]:
    """The counted window, the drift scores and the champion's number; and by domain what the requests that were judged
    in it say of the live and the static drafter: `measured` holds (live, static, positions)."""
    found = {**values, "drafter_version": float(number), "drift": max(drift.values(), default=0.0)}
    found |= {f"drift/{domain}": score for domain, score in drift.items()}
    for domain, (live, static, positions) in measured.items():
        if positions:
            found |= {f"alpha_estimated/{domain}": live / positions, f"alpha_static/{domain}": static / positions}
    return found
