"""The checks: each looks at the evidence and names one fault, with what shows it and what to do about it.

Pure functions in the order in which a fault explains others. A check without enough evidence says nothing; the least
counts are those at which chance alone would rarely look like the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.doctor_evidence import Evidence
from shared.artifact import same_target
from shared.trace import TraceRecord

LEAST_TESTED = 400  # an alpha of 0.3 is then known to ± 0.05 and better
LEAST_TRACES = 10
LATE_S = 60.0  # a replica looks for its champion every second


@dataclass(frozen=True)
class Finding:
    fault: str
    evidence: str
    remedy: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """Everything that is wrong; empty on a healthy stack."""
    return [finding for check in CHECKS for finding in check(evidence)]


def _services(e: Evidence) -> list[Finding]:
    found = []
    if e.api[0] != 200:
        found.append(
            Finding(
                "the API is not ready", f"/readyz: {e.api[0] or 'no answer'} {e.api[1][:200]}", "See the replica's log"
            )
        )
    if e.redis_error:
        found.append(
            Finding("Redis is away", e.redis_error, "Start it; requests are served meanwhile, and traces are lost")
        )
    return found


def _speculation_off(e: Evidence) -> list[Finding]:
    drafter = e.config.drafter
    if drafter.kind == "none" or drafter.gamma == 0 or drafter.gamma_max == 0:
        said = f"drafter.kind is {drafter.kind}, drafter.gamma {drafter.gamma}, drafter.gamma_max {drafter.gamma_max}"
        return [Finding("speculation is off", said, "Set drafter.kind to auto and drafter.gamma to auto")]
    steps, rounds = e.counters.total("steps"), e.counters.total("spec_steps")
    if steps >= LEAST_TESTED and not rounds and not e.drafter_error:
        said = f"none of {steps:,.0f} steps drafted anything"
        return [Finding("speculation is off", said, "Send requests without speculative: false, and name a drafter")]
    return []


def _family(e: Evidence) -> list[Finding]:
    target = e.target
    if target is None:
        return []
    if e.head is not None and not same_target(e.head.target, target.fingerprint):
        said = f"the head was made for target {e.head.target[:12]}…, {target.name} is {target.fingerprint[:12]}…"
        return [Finding("the drafter is of another family", said, "Serve that target, or `redraft train-drafter`")]
    if e.drafter is not None and e.drafter.family != target.family and e.drafter.tokens == target.tokens:
        said = f"the drafter is a {e.drafter.family}, the target a {target.family}"
        return [Finding("the drafter is of another family", said, "Use a smaller model of the target's own family")]
    return []


def _vocabulary(e: Evidence) -> list[Finding]:
    target, drafter = e.target, e.drafter
    if target is None or drafter is None or drafter.tokens == target.tokens:
        return []
    token = next(t for t in {**target.tokens, **drafter.tokens} if target.tokens.get(t) != drafter.tokens.get(t))
    said = (
        f"{token!r} has id {drafter.tokens.get(token)} in the drafter and {target.tokens.get(token)} in the target "
        f"({len(drafter.tokens):,} and {len(target.tokens):,} tokens)"
    )
    return [Finding("the tokenizers differ", said, "Use a drafter that shares the target's tokenizer")]


def _drafter_refused(e: Evidence) -> list[Finding]:
    if not e.drafter_error or _family(e) or _vocabulary(e):
        return []
    return [Finding("the drafter cannot be loaded", e.drafter_error, "Mend drafter.model")]


def _template(e: Evidence) -> list[Finding]:
    if e.target is None or not e.target.template_ids or len(e.traces) < LEAST_TRACES:
        return []
    marks = e.target.template_ids
    bare = sum(1 for record in e.traces if marks.isdisjoint(record.prompt_ids.tolist()))
    if bare * 2 <= len(e.traces):
        return []
    said = f"{bare} of the newest {len(e.traces)} prompts have none of the chat template's own tokens"
    return [Finding("prompts do not follow the template", said, "Use /v1/chat/completions, which applies it")]


def _temperature(e: Evidence) -> list[Finding]:
    hot, cool = ([r for r in e.traces if (r.sampling.temperature > 1.0) is is_hot] for is_hot in (True, False))
    hot_alpha, hot_tested = _alpha(hot)
    cool_alpha, cool_tested = _alpha(cool)
    if hot_tested < LEAST_TESTED or hot_tested < cool_tested:
        return []
    said = f"{len(hot)} of {len(e.traces)} requests sample above temperature 1, with α {hot_alpha:.2f}"
    if cool_tested:
        said += f" where the others have {cool_alpha:.2f}"
    return [
        Finding("the temperature is high", said, "Lower it, or let drafter.gamma be auto and the learner learn from it")
    ]


def _drift(e: Evidence) -> list[Finding]:
    scores = (e.learner or {}).get("drift") or {}
    found = []
    for domain in e.counters.tag_values("domain"):
        accepted, tested = e.counters.alpha_counts(domain=domain)
        if tested >= LEAST_TESTED and float(scores.get(domain, 0.0)) >= 1.0:
            said = f"its drift score is {scores[domain]:.2f}, its α {accepted / tested:.2f} of {tested:,.0f}"
            state = (e.learner or {}).get("next") or "the learner has not said what it does next"
            found.append(Finding(f"the domain {domain} has drifted", said, f"Let the learner work ({state})"))
    held = (e.head.metrics.get("held_out") if e.head is not None else None) or {}
    for domain, counts in held.items():
        accepted, tested = e.counters.alpha_counts(domain=domain)
        if tested < LEAST_TESTED or float(scores.get(domain, 0.0)) >= 1.0:
            continue
        expected = float(counts.get("alpha", 0.0))
        if accepted / tested < 0.5 * expected:
            said = f"its α is {accepted / tested:.2f} of {tested:,.0f}; the head had {expected:.2f} on held-out text"
            found.append(Finding(f"the domain {domain} has drifted", said, "Turn the learner on, or train a new base"))
    return found


def _stale(e: Evidence) -> list[Finding]:
    champion = e.champion
    if champion is None or e.now - champion.created_at < LATE_S:
        return []
    behind = {
        name: str(status.get("drafter_version"))
        for name, status in e.replicas.items()
        if status.get("drafter_version") not in (None, champion.version)
    }
    if not behind:
        return []
    refused = {k: int(v) for k, v in e.counters.fields.items() if k.startswith("swaps_refused.") and v}
    said = f"the champion is {champion.version}, and {', '.join(f'{n} serves {v}' for n, v in behind.items())}"
    said += f"; refused swaps: {refused}" if refused else ""
    return [Finding("a replica's drafter is stale", said, "See its log; restarting it loads the champion")]


def _context(e: Evidence) -> list[Finding]:
    most = int(e.head.config.get("max_positions", 0)) if e.head is not None else 0
    if not most or len(e.traces) < LEAST_TRACES:
        return []
    beyond = sum(1 for record in e.traces if len(record.prompt_ids) + len(record.output_ids) > most)
    if beyond * 10 < len(e.traces):
        return []
    said = f"{beyond} of {len(e.traces)} requests go beyond the head's {most:,} positions, where it cannot draft"
    return [Finding("the drafter's context is too short", said, "Train a head with more positions, or cut the prompts")]


def _gamma(e: Evidence) -> list[Finding]:
    gamma = e.config.drafter.gamma
    drafted, tested = e.counters.total("drafted"), e.counters.total("tested")
    if gamma == "auto" or gamma < 2 or drafted < LEAST_TESTED or tested > 0.5 * drafted:
        return []
    said = f"gamma is fixed at {gamma}, and verification reached only {tested:,.0f} of {drafted:,.0f} drafts"
    return [Finding("gamma is too long", said, "Set drafter.gamma to auto, or lower it")]


def _batch(e: Evidence) -> list[Finding]:
    full = [s for s in e.replicas.values() if s.get("waiting", 0) and s.get("running", 0) >= e.config.engine.max_batch]
    steps, rounds = e.counters.total("steps"), e.counters.total("spec_steps")
    if not full or steps < LEAST_TESTED or rounds > 0.1 * steps or not rounds:
        return []
    said = (
        f"{len(full)} replicas run {e.config.engine.max_batch} requests with others waiting, and of {steps:,.0f} "
        f"request steps {rounds:,.0f} drafted: with so many rows drafts no longer pay"
    )
    return [
        Finding(
            "the batch is too large for speculation", said, "Add replicas (`redraft plan`), or lower engine.max_batch"
        )
    ]


def _learner(e: Evidence) -> list[Finding]:
    if not e.config.learner.enabled or e.redis_error:
        return []
    if e.learner is None:
        return [
            Finding(
                "the learner is down", "it is enabled, and sends no heartbeat", "See its log; `redraft up` starts it"
            )
        ]
    trouble = e.learner.get("trouble") or []
    return [Finding("the learner is in trouble", "; ".join(map(str, trouble)), "Mend what it names")] if trouble else []


def _lost(e: Evidence) -> list[Finding]:
    dropped, dead, unread = int(e.counters.total("traces_dropped")), e.depth.dead, e.depth.trimmed_unread
    if not dropped + dead + unread:
        return []
    said = f"{dropped:,} dropped by replicas, {unread:,} trimmed before they were read, {dead:,} unreadable"
    return [
        Finding("traces are lost", said, "Raise trace.queue and trace.stream_bytes, or give the learner more threads")
    ]


def _alpha(records: Sequence[TraceRecord]) -> tuple[float, int]:
    tested = sum(r.tested for record in records for r in record.rounds)
    accepted = sum(r.accepted for record in records for r in record.rounds)
    return (accepted / tested if tested else 0.0), tested


Check = Callable[[Evidence], list[Finding]]
CHECKS: tuple[Check, ...] = (
    _services, _speculation_off, _family, _vocabulary, _drafter_refused, _template, _temperature, _drift, _stale,
    _context, _gamma, _batch, _learner, _lost,
)  # fmt: skip
