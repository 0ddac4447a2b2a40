"""What is exported to Prometheus: names, kinds, labels, and from which counters and heartbeats each is read.

The one place that names a metric. Names of speculation follow the field (`spec_decode_num_…_total`, positions from 0).
Everything is a sum, a count or a state, never a mean (law 10); `redraft_kv_usage_ratio` is what autoscaling and alerts
ask for, and stands beside its numerator and denominator. Labels are bounded: domains by `serve.max_domains`, and
drafter versions appear only as the one that a replica serves. It knows no library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.counters import parse_field

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
TOKEN_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)  # seconds
PAUSE_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds
GAMMA_BOUNDS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)  # Ray takes no bound of 0: the first is plain steps


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""  # at most one
    bounds: tuple[float, ...] = ()  # of a histogram


@dataclass(frozen=True)
class Buckets:
    """A histogram's state: how many values lie in each bucket (the last one is open), and what they add up to."""

    counts: tuple[float, ...]
    total: float


@dataclass(frozen=True)
class Sample:
    metric: Metric
    label: str  # value of the metric's label
    value: float | Buckets


@dataclass(frozen=True)
class _Source:
    """Where a counter field goes. Without a `label`, the label's value is the field's own domain or its suffix."""

    metric: Metric
    label: str = ""


def _counter(name: str, help: str, label: str = "") -> Metric:
    return Metric(name, "counter", help, label)


_PHASES = _counter("redraft_phase_seconds_total", "Seconds of the decoding thread", "phase")
_REQUESTS = _counter("redraft_requests_total", "Requests by how they ended", "outcome")
_REDACTED = _counter("redraft_traces_redacted_total", "Traces that are shorter or gone for privacy, by how", "outcome")
_COUNTERS: dict[str, _Source] = {
    "spec_steps": _Source(_counter("redraft_spec_decode_num_drafts_total", "Steps with drafts", "domain")),
    "drafted": _Source(_counter("redraft_spec_decode_num_draft_tokens_total", "Tokens drafted", "domain")),
    "accepted": _Source(_counter("redraft_spec_decode_num_accepted_tokens_total", "Drafted tokens accepted", "domain")),
    "accepted_at": _Source(
        _counter("redraft_spec_decode_num_accepted_tokens_per_pos_total", "Accepted, by place in the draft", "position")
    ),
    "tested": _Source(_counter("redraft_tested_tokens_total", "Drafted tokens that verification reached", "domain")),
    "tested_at": _Source(_counter("redraft_tested_tokens_per_pos_total", "Tested, by place in the draft", "position")),
    "emitted": _Source(_counter("redraft_emitted_tokens_total", "Tokens sent to clients", "domain")),
    "steps": _Source(_counter("redraft_steps_total", "Target forwards of a request, plain ones included", "domain")),
    "schedule_s": _Source(_PHASES, "schedule"),
    "draft_s": _Source(_PHASES, "draft"),
    "verify_s": _Source(_PHASES, "verify"),
    "sample_s": _Source(_PHASES, "sample"),
    "requests_finished": _Source(_REQUESTS, "finished"),
    "requests_cancelled": _Source(_REQUESTS, "cancelled"),
    "requests_failed": _Source(_REQUESTS, "failed"),
    "traces_published": _Source(_counter("redraft_traces_published_total", "Traces that Redis has taken")),
    "traces_dropped": _Source(_counter("redraft_traces_dropped_total", "Traces lost for want of room or of Redis")),
    "traces_withheld": _Source(
        _counter("redraft_traces_withheld_total", "Requests whose traces their tenant's policy held back")
    ),
    "redacted_cut": _Source(_REDACTED, "cut"),
    "redacted_whole": _Source(_REDACTED, "whole"),
    "redaction_failed": _Source(_REDACTED, "failed"),
    "redaction_dropped": _Source(_REDACTED, "dropped"),
    "features_dropped": _Source(_counter("redraft_features_dropped_total", "Requests whose features were lost")),
    "swaps": _Source(_counter("redraft_swaps_total", "Drafter versions taken")),
    "swaps_refused": _Source(_counter("redraft_swaps_refused_total", "Drafter versions refused", "reason")),
}
_JUDGED = {"served", "timed"}  # by version: what the learner judges a release by, and `redraft drafters` shows
_GAMMA = Metric("redraft_gamma", "histogram", "Tokens drafted in a step; 0 is plain decoding", bounds=GAMMA_BOUNDS)
_HISTOGRAMS: dict[str, tuple[Metric, str]] = {  # field of the counts -> (metric, field of the sum)
    "gamma_at": (_GAMMA, "drafted"),
    "swap_pause_le": (
        Metric("redraft_swap_pause_seconds", "histogram", "Pause of decoding in a swap", bounds=PAUSE_BOUNDS),
        "swap_pause_s",
    ),
    "first_token_le": (
        Metric(
            "redraft_time_to_first_token_seconds",
            "histogram",
            "From a request's admission to its first token",
            bounds=FIRST_TOKEN_BOUNDS,
        ),
        "first_token_s",
    ),
    "token_le": (
        Metric(
            "redraft_inter_token_latency_seconds",
            "histogram",
            "Between tokens; those of one step share its time",
            bounds=TOKEN_BOUNDS,
        ),
        "token_s",
    ),
}
_GAUGES: dict[str, Metric] = {  # field of a replica's heartbeat -> metric
    "running": Metric("redraft_requests_running", "gauge", "Requests that are decoded"),
    "waiting": Metric("redraft_requests_waiting", "gauge", "Requests that wait for room"),
    "blocks_free": Metric("redraft_kv_blocks_free", "gauge", "KV blocks without an owner"),
    "blocks_total": Metric("redraft_kv_blocks", "gauge", "KV blocks"),
    "trace_queue": Metric("redraft_trace_queue", "gauge", "Traces that wait in the replica"),
}
_KV_USAGE = Metric("redraft_kv_usage_ratio", "gauge", "Share of the KV blocks that are taken")
_VERSION = Metric("redraft_drafter_info", "gauge", "1 for the drafter version that the replica serves", "version")
_BEAT = Metric("redraft_learner_heartbeat_timestamp_seconds", "gauge", "When the learner was last seen alive")
_DRIFT = Metric("redraft_drift_score", "gauge", "How far a domain's alpha has fallen; from 1 on it counts", "domain")
_CHAMPION = Metric("redraft_champion_number", "gauge", "Number of the champion; it grows with each promotion")
_FRESH = Metric("redraft_learner_fresh_tokens", "gauge", "Tokens that came since the last attempt looked")
_DECISIONS = _counter("redraft_gate_decisions_total", "Attempts by what became of them", "decision")
_TRACES = _counter("redraft_learner_traces_total", "Traces by what the learner did with them", "outcome")
_FAILURES = _counter("redraft_learner_failures_total", "What went wrong in the learner, by where", "where")
_LEARNER: dict[str, _Source] = {
    "decisions": _Source(_DECISIONS),
    "traces_stored": _Source(_TRACES, "stored"),
    "traces_unmeasured": _Source(_TRACES, "unmeasured"),
    "traces_again": _Source(_TRACES, "again"),
    "traces_dead": _Source(_TRACES, "dead"),
    "traces_expired": _Source(_TRACES, "expired"),
    "traces_expired_in_buffer": _Source(_TRACES, "expired_in_buffer"),
    "traces_erased": _Source(_TRACES, "erased"),
    "replicas_late": _Source(
        _counter("redraft_replicas_late_total", "Replicas that were not at their version in time")
    ),
    "attempts_failed": _Source(_FAILURES, "attempt"),
    "redis_failures": _Source(_FAILURES, "redis"),
    "disk_failures": _Source(_FAILURES, "disk"),
    "stumbles": _Source(_FAILURES, "loop"),
}
REDIS = Metric("redraft_redis_up", "gauge", "1 when the replica that answers could read Redis")

SERVING_METRICS = tuple(
    dict.fromkeys(
        [source.metric for source in _COUNTERS.values()]
        + [metric for metric, _ in _HISTOGRAMS.values()]
        + [*_GAUGES.values(), _KV_USAGE, _VERSION]
    )
)
LEARNER_METRICS = tuple(
    dict.fromkeys([source.metric for source in _LEARNER.values()] + [_BEAT, _DRIFT, _CHAMPION, _FRESH])
)


def serving_samples(counters: Mapping[str, float], status: Mapping[str, Any]) -> Iterator[Sample]:
    """What one replica's cumulative counters and its heartbeat say."""
    yield from _counted(counters, _COUNTERS)
    for field, (metric, total) in _HISTOGRAMS.items():
        yield Sample(metric, "", _buckets(counters, metric, field, total))
    for field, metric in _GAUGES.items():
        if field in status:
            yield Sample(metric, "", float(status[field]))
    if status.get("blocks_total"):
        yield Sample(_KV_USAGE, "", 1 - status["blocks_free"] / status["blocks_total"])
    if status.get("drafter_version"):
        yield Sample(_VERSION, str(status["drafter_version"]), 1.0)


def learner_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """What the learner's heartbeat says."""
    if "at" in status:
        yield Sample(_BEAT, "", float(status["at"]))
    yield from _counted(status.get("counters", {}), _LEARNER)
    for domain, score in status.get("drift", {}).items():
        yield Sample(_DRIFT, domain, float(score))
    for field, metric in (("number", _CHAMPION), ("fresh_tokens", _FRESH)):
        if field in status:
            yield Sample(metric, "", float(status[field]))


def unknown_fields(counters: Mapping[str, float]) -> set[str]:
    """Names of a replica's counters that no metric shows, and should."""
    names = {_named(field)[0] for field in counters}
    return names - _JUDGED - set(_COUNTERS) - set(_HISTOGRAMS) - {total for _, total in _HISTOGRAMS.values()}


def _counted(counters: Mapping[str, float], sources: Mapping[str, _Source]) -> Iterator[Sample]:
    """Sums over whatever the label does not tell apart, above all drafter versions."""
    sums: dict[tuple[Metric, str], float] = {}
    for field, value in counters.items():
        name, suffix, tags = _named(field)
        if name not in sources:
            continue
        source = sources[name]
        metric, label = source.metric, source.label or suffix
        if metric.label == "domain":
            label = tags.get("domain", "")
        elif metric.label == "position":
            label = str(int(suffix) - 1)
        sums[metric, label] = sums.get((metric, label), 0.0) + value
    for (metric, label), value in sums.items():
        yield Sample(metric, label, value)


def _buckets(counters: Mapping[str, float], metric: Metric, field: str, total: str) -> Buckets:
    counts, added = [0.0] * (len(metric.bounds) + 1), 0.0
    for key, value in counters.items():
        name, suffix, _ = _named(key)
        if name == field:
            counts[bisect_left(metric.bounds, float(suffix))] += value
        elif name == total:
            added += value
    return Buckets(tuple(counts), added)


def _named(field: str) -> tuple[str, str, dict[str, str]]:
    """(name, what follows its first dot, tags) of `tested_at.2` or `accepted|domain=sql|version=v3`."""
    whole, tags = parse_field(field)
    name, _, suffix = whole.partition(".")
    return name, suffix, tags
