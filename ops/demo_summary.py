"""The end of a run in the terminal: the claim as a table, what it rests on, and where the files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def summary(report: Mapping[str, Any]) -> RenderableType:
    """Of `ops.demo_report.report`."""
    facts = (Padding(Text.from_markup(line), (0, 0, 0, 2)) for line in _facts(report))
    return Group(Text(), _claim(report), *facts)


def _claim(report: Mapping[str, Any]) -> Table:
    table = Table(title="α over the last third of each domain, on the same requests", title_justify="left")
    table.add_column("domain")
    for column in ("requests", "positions", "static drafter", "live drafter", "gain", "95 % interval"):
        table.add_column(column, justify="right")
    live, static = report["alpha_live_last_third"], report["alpha_static_last_third"]
    for domain, counts in report["last_third"].items():
        interval = report["alpha_gain_ci95_by_domain"][domain]
        alphas = static["domains"][domain], live["domains"][domain]
        gain = _gain(*alphas, interval, learnt=domain not in report["unlearnt"])
        table.add_row(domain, f"{counts['requests']}", f"{counts['positions']:,}", *gain)
    if len(report["last_third"]) > 1:
        table.add_section()
        requests, positions = (
            sum(c[name] for c in report["last_third"].values()) for name in ("requests", "positions")
        )
        learnt = set(report["last_third"]) > set(report["unlearnt"])
        gain = _gain(static["overall"], live["overall"], report["alpha_gain_ci95"], learnt=learnt)
        table.add_row("together", f"{requests}", f"{positions:,}", *gain, style="bold")
    return table


def _gain(
    static: float | None, live: float | None, interval: Sequence[float] | None, *, learnt: bool
) -> tuple[str, str, str, str]:
    if static is None or live is None:
        return "–", "–", "–", "nothing measured"
    if not learnt:
        return f"{static:.3f}", f"{live:.3f}", "–", "too short to show learning"
    colour = "" if interval is None else "green" if interval[0] > 0 else "red" if interval[1] < 0 else "yellow"
    gain = f"{live - static:+.3f}"
    said = "too few requests" if interval is None else f"{interval[0]:+.3f} … {interval[1]:+.3f}"
    return f"{static:.3f}", f"{live:.3f}", f"[{colour}]{gain}[/]" if colour else gain, said


def _facts(report: Mapping[str, Any]) -> list[str]:
    requests, check = report["requests"], report["agreement"]
    lines = [
        f"{requests['answered']:,} requests, {report['tokens']:,.0f} tokens in {report['seconds']:.0f} s "
        f"([bold]{report['tokens_per_second']:.0f} tokens/s[/]); {requests['measured']:,} of the requests were measured"
        + (f", [yellow]{requests['unmeasured']:,} were not[/]" if requests["unmeasured"] else "")
    ]
    if requests["failed"]:
        lines.append(f"[red]{requests['failed']:,} requests failed[/]; the first: {escape(requests['first_error'])}")
    lines.append(_promotions(report))
    if report["unlearnt"]:
        lines.append(
            f"[yellow]the run was too short to show learning[/] in {', '.join(report['unlearnt'])}: no learnt drafter "
            f"served the last third of it ({report['attempts']} attempts had begun); give it more --minutes"
        )
    if check["tested"]:
        counted = check["accepted"] / check["tested"]
        expected = check["expected_accepted"] / check["expected_tested"]
        interval = check["difference_ci95"]
        within = f", difference {interval[0]:+.3f} … {interval[1]:+.3f}" if interval else ""
        lines.append(
            f"the live drafter's α as counted while serving: {counted:.3f} "
            f"({check['accepted']:,.0f} / {check['tested']:,.0f}); as estimated from the traces: {expected:.3f}{within}"
        )
    if lost := report["traces_dropped"]:
        lines.append(f"[yellow]{lost:,.0f} traces were dropped[/]")
    if lost := report["features_dropped"]:
        lines.append(f"[yellow]the features of {lost:,.0f} requests were dropped[/], so they were not measured")
    return lines


def _promotions(report: Mapping[str, Any]) -> str:
    promotions, pause = report["promotions"], report["swap_pause_seconds"]
    if not promotions:
        return "no version was promoted"
    named = ", ".join(f"{p['version']} at {p['seconds']:.0f} s" for p in promotions)
    paused = "" if pause is None else f"; a swap paused serving for {1000 * pause:.1f} ms on average"
    return f"{len(promotions)} promoted: {named}{paused}"
