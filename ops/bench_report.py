"""What a bench showed: one JSON object, and the tables for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ops.bench_attainable import attainable
from ops.bench_line_up import comparisons
from ops.bench_ratios import ALL, CONFIDENCE, RESAMPLES, paired_ratios
from ops.bench_rows import rows
from ops.bench_run import Findings
from ops.bench_settings import BenchSettings
from ops.demo_files import about

_METHOD = (
    "A ratio is the median over pairs (same prompts, same repeat) of tokens a second of the numerator over those of "
    f"the denominator; low and high are its {CONFIDENCE:.0%} interval by {RESAMPLES} bootstrap draws over groups of "
    "prompts and, within each, over repeats. Contenders take turns at every group, in an order that rotates."
)
_THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_")


def report(findings: Findings, settings: BenchSettings) -> dict[str, Any]:
    """The JSON object."""
    told = about(settings.to_dict())
    results, seed = findings.results, settings.seed
    versions = {name: facts["version"] for name, facts in findings.facts.items() if facts.get("version")}
    return {
        "machine": {
            **told["machine"],
            "memory_bytes": psutil.virtual_memory().total,
            "read_bandwidth_bytes_s": findings.bandwidth,
            "threads": settings.threads,
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_THREAD_VARIABLES)},
        },
        "versions": {**told["versions"], **versions},
        "command": told["command"],
        "commit": told["commit"],
        "settings": told["settings"],
        "method": _METHOD,
        "complete": findings.complete,
        "failed": findings.failed,
        "contenders": {
            contender.name: dict(findings.facts.get(contender.name, {})) for contender in findings.contenders
        },
        "rows": rows(findings),
        "ratios": [asdict(ratio) for ratio in paired_ratios(results, comparisons(findings.contenders), seed=seed)],
        "attainable": [asdict(entry) for entry in attainable(results, findings.contenders, seed=seed)],
        "swaps": {
            name: [{**swap, "pause_steps": swap["pause_s"] / swap["step_s"]} for swap in found]
            for name, found in findings.swaps.items()
        },
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """Domains together; every domain apart only where it is the only one, or for ours over our plain decoding."""
    console.print(_speeds(_together(found["rows"])))
    if found["ratios"]:
        console.print(_ratios(found["ratios"]))
    if found["attainable"]:
        console.print(_attainable(found["attainable"]))
    for name, swaps in found["swaps"].items():
        for swap in swaps:
            console.print(
                f"swap in {name}: decoding paused {1e3 * swap['pause_s']:.2f} ms, {swap['pause_steps']:.2f} steps of "
                f"{1e3 * swap['step_s']:.1f} ms ({1e3 * swap['step_while_preparing_s']:.1f} ms while it was prepared)"
            )
    bandwidth = found["machine"]["read_bandwidth_bytes_s"]
    console.print(f"memory is read at {bandwidth / 1e9:.1f} GB/s with {found['machine']['threads']} threads")
    console.print(_METHOD, style="dim")
    for name, reason in found["failed"].items():
        console.print(f"{name} left the run: {reason}", style="red")
    if not found["complete"]:
        console.print("The run was not completed; this is what it had measured.", style="red")


def _together(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    whole = [entry for entry in entries if entry["domain"] == ALL]
    return whole or list(entries)


def _speeds(entries: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens a second, median (least … most) of all calls")
    table.add_column("contender")
    for name in (
        "batch",
        "tok/s",
        "TTFT ms",
        "ITL ms",
        "p99",
        "tok/step",
        "α",
        "other %",
        "bandwidth %",
        "peak MB",
        "huge MB",
    ):
        table.add_column(name, justify="right")
    for row in sorted(entries, key=lambda row: row["batch"]):
        table.add_row(
            row["contender"],
            str(row["batch"]),
            f"{row['tok_s']:.1f} ({row['tok_s_min']:.1f} … {row['tok_s_max']:.1f})",
            _number(row["ttft_s"], 1e3, 0),
            _number(row["itl_s"], 1e3, 1),
            _number(row["gap_s_p99"], 1e3, 0),
            _number(row["tokens_per_step"], 1, 2),
            _number(row["alpha"], 1, 3),
            _number(row["overhead_share"], 100, 1),
            _number(row["bandwidth_share"], 100, 0),
            _number(row["peak_memory_bytes"], 1e-6, 0),
            _number(row["huge_page_bytes"], 1e-6, 0),
        )
    return table


def _ratios(entries: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(
        "", "over", "batch", "domain", "ratio", "95 % interval", "pairs", title="Paired ratios of tokens a second"
    )
    for ratio in entries:
        interval = f"{ratio['low']:.3f} … {ratio['high']:.3f}"
        who = (ratio["numerator"], ratio["denominator"], str(ratio["batch"]), ratio["domain"])
        table.add_row(*who, f"{ratio['ratio']:.3f}", interval, str(ratio["pairs"]))
    return table


def _attainable(entries: Iterable[Mapping[str, Any]]) -> Table:
    columns = (
        "",
        "batch",
        "domain",
        "α",
        "tok/step",
        "E(α, γ)",
        "cost",
        "allowed",
        "measured",
        "share",
        "95 % interval",
    )
    table = Table(*columns, title="What α and step costs allow over plain decoding, and what was reached")
    for entry in entries:
        names = ("alpha", "tokens_per_step", "expected_tokens_per_step", "cost", "allowed", "measured", "share")
        numbers = [f"{entry[name]:.3f}" for name in names]
        interval = f"{entry['low']:.3f} … {entry['high']:.3f}"
        table.add_row(entry["contender"], str(entry["batch"]), entry["domain"], *numbers, interval)
    return table


def _number(value: float | None, scale: float, digits: int) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"
