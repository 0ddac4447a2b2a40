"""`redraft doctor`: is the set-up right, and why is α low; every fault with its evidence and a remedy.

Exit code 0: nothing was found; 1: something was; 2: there is nothing to look at. Changes nothing.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from ops import settings
from ops.doctor_checks import CHECKS, Finding, diagnose
from ops.doctor_evidence import Evidence, gather

FOUND = 1


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: Namespace) -> int:
    evidence = gather(settings.read_settings(arguments).config)
    findings = diagnose(evidence)
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False))
    else:
        Console().print(render(evidence, findings))
    return FOUND if findings else 0


def render(evidence: Evidence, findings: Sequence[Finding]) -> str:
    accepted, tested = evidence.counters.alpha_counts()
    alpha = f"α {accepted / tested:.3f} ({accepted:,.0f} of {tested:,.0f})" if tested else "nothing was drafted yet"
    seen = f"{alpha}; {len(evidence.replicas)} replicas, {len(evidence.traces)} traces looked at, {len(CHECKS)} checks"
    if not findings:
        return f"Nothing is wrong. {seen}"
    parts = [seen]
    for finding in findings:
        parts.append(
            f"\n[bold]{escape(finding.fault)}[/]\n  evidence: {escape(finding.evidence)}\n"
            f"  remedy: {escape(finding.remedy)}"
        )
    return "\n".join(parts)
