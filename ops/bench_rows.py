"""One row for each contender, batch and domain: medians and spreads of speed, and counts with their few ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ops.bench_line_up import Contender
from ops.bench_measure import Measure
from ops.bench_ratios import of, spots
from ops.bench_run import Findings


def rows(findings: Findings) -> list[dict[str, Any]]:
    """In the order of contenders. A figure that a contender cannot know is None."""
    found = []
    for contender in findings.contenders:
        for batch, domain in spots(findings.results):
            measures = [result.measure for result in of(findings.results, contender.name, batch, domain)]
            if measures:
                found.append({**_who(contender, findings, batch, domain), **_figures(measures, contender, findings)})
    return found


def _who(contender: Contender, findings: Findings, batch: int, domain: str) -> dict[str, Any]:
    facts = findings.facts.get(contender.name, {})
    memory = findings.memory.get(contender.name, {})
    drafter = facts.get("drafter", "")
    return {
        "contender": contender.name,
        "kind": contender.kind,
        "drafter": f"{contender.drafter} {drafter}".strip() if contender.ours else drafter,
        "weights": facts.get("weights", ""),
        "batch": batch,
        "domain": domain,
        "gamma": contender.gamma or None,
        "peak_memory_bytes": memory.get("peak"),
        "memory_bytes": memory.get("now"),
        "huge_page_bytes": memory.get("huge"),
    }


def _figures(measures: Sequence[Measure], contender: Contender, findings: Findings) -> dict[str, Any]:
    speeds = np.array([measure.tok_s for measure in measures])
    decode = [measure.decode for measure in measures]
    decode_s, decode_tokens = sum(d.seconds for d in decode), sum(d.tokens for d in decode)
    steps, drafted = sum(m.steps for m in measures), sum(m.drafted for m in measures)
    accepted, tested = sum(m.accepted for m in measures), sum(m.tested for m in measures)
    tokens = sum(m.tokens for m in measures)
    model_s, forwards = sum(d.model_s for d in decode), sum(d.forwards for d in decode)
    return {
        "tok_s": float(np.median(speeds)),
        "tok_s_min": float(speeds.min()),
        "tok_s_max": float(speeds.max()),
        "tok_s_p25": float(np.quantile(speeds, 0.25)),
        "tok_s_p75": float(np.quantile(speeds, 0.75)),
        "decode_tok_s": _ratio(decode_tokens, decode_s),
        **_spread("ttft_s", [value for m in measures for value in m.times.ttft_s]),
        **_spread("itl_s", [value for m in measures for value in m.times.itl_s]),
        **_spread("gap_s", [value for m in measures for value in m.times.gaps_s]),
        **_spread("latency_s", [value for m in measures for value in m.times.latency_s]),
        "tokens_per_step": _ratio(tokens, steps),
        "alpha": _ratio(accepted, tested),
        "gamma_mean": _ratio(drafted, steps) if contender.ours else None,
        "overhead_share": 1 - model_s / decode_s if model_s and decode_s else None,
        "bandwidth_share": _bandwidth_share(contender, findings, forwards, decode_s),
        "phases_s": _summed([m.phases for m in measures]),  # of whole calls
        "decode_phases_s": _summed([d.phases for d in decode]),  # of steps that read no prompt
        "decode_s": decode_s,
        "calls": len(measures),
        "seconds": sum(m.seconds for m in measures),
        "tokens": tokens,
        "steps": steps or None,
        "forwards": sum(m.forwards for m in measures) or None,
        "drafted": drafted,
        "tested": tested,
        "accepted": accepted,
    }


def _bandwidth_share(contender: Contender, findings: Findings, forwards: int, seconds: float) -> float | None:
    """How much of the measured read bandwidth the target's weights take up, read once for each forward."""
    weight_bytes = findings.facts.get(contender.name, {}).get("weight_bytes", 0)
    if not (weight_bytes and forwards and seconds and findings.bandwidth):
        return None
    return float(weight_bytes * forwards / seconds / findings.bandwidth)


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median under the name itself, then the 90th and 99th percentile."""
    shares = {name: 0.5, f"{name}_p90": 0.9, f"{name}_p99": 0.99}
    if not values:
        return dict.fromkeys(shares)
    array = np.asarray(values, dtype=np.float64)
    return {key: float(np.quantile(array, share)) for key, share in shares.items()}


def _summed(parts: Sequence[Any]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
