"""What `redraft status` gathered, as tables for people: α by domain, replicas, the learner's last decision, losses.

Every α stands beside the counts that it comes from. Computes nothing else, and asks nobody.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shared.counters import Counters

# What was lost, by its counter or field, in the words of a person who has never read the code.
_LOST = {
    "traces_dropped": "traces that a replica had no room for",
    "trimmed_unread": "traces trimmed from the stream before the learner read them",
    "dead": "traces that nobody can read",
    "features_dropped": "requests whose features were dropped",
    "given_up": "entries given up on the way to MLflow",
}


def render(report: Mapping[str, Any]) -> RenderableType:
    """Of `ops.status.gather`."""
    parts: list[RenderableType] = [_services(report)]
    if not report["redis"]["error"]:
        parts += [_alpha(report["domains"]), _replicas(report["replicas"]), _learner(report), _traces(report)]
    return Group(*parts)


def _services(report: Mapping[str, Any]) -> Table:
    api, answer = report["api"], report["api"]["answer"]
    state = answer.get("status", "") if isinstance(answer, dict) else f"no answer ({answer})"
    table = _table("Services", "service", "url", "state")
    table.add_row("api", api["url"], escape(state))
    table.add_row("redis", report["redis"]["url"], escape(report["redis"]["error"]) or "answers")
    trouble = ((report.get("learner") or {}).get("mlflow") or {}).get("trouble", "")
    table.add_row("mlflow", report["mlflow"]["url"], escape(trouble))
    return table


def _alpha(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("α by domain and drafter version", "domain", "version")
    for column in ("accepted", "tested", "α"):
        table.add_column(column, justify="right")
    for row in rows:
        alpha = f"{row['accepted'] / row['tested']:.3f}"
        table.add_row(row["domain"], row["version"], f"{row['accepted']:,.0f}", f"{row['tested']:,.0f}", alpha)
    if not rows:
        table.add_row("(nothing drafted yet)")
    return table


def _replicas(replicas: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("Replicas", "replica", "drafter", "state")
    for column in ("running", "waiting", "KV blocks free"):
        table.add_column(column, justify="right")
    for name, status in replicas.items():
        short = name.rpartition("#")[2] if "#" in name else name  # Serve's names end in what tells replicas apart
        blocks = f"{status.get('blocks_free', '?')} of {status.get('blocks_total', '?')}"
        counts = (f"{status.get(field, '?')}" for field in ("running", "waiting"))
        state = "draining" if status.get("draining") else "serving"
        table.add_row(short, str(status.get("drafter_version") or "(none)"), state, *counts, blocks)
    if not replicas:
        table.add_row("(no heartbeat)")
    return table


def _learner(report: Mapping[str, Any]) -> Table:
    table = Table("", "", title="Learner", title_justify="left", show_header=False)
    champion = report["champion"]
    if champion is None:
        table.add_row("champion", "the base drafter: nothing has been promoted")
    else:
        age = _ago(time.time() - champion["created_at"])
        table.add_row("champion", f"{champion['version']} (no. {champion['number']}), promoted {age}")
        table.add_row("before it", champion["previous"] or "the base drafter")
    table.add_row("served", escape(_convergence(report)))
    for name, said in _words_of(report["learner"]):
        table.add_row(name, escape(said))
    return table


def _words_of(learner: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if learner is None:
        return [("state", "no heartbeat: it does not run")]
    found = [("state", str(learner.get("state", "?")))]
    found += [("trouble", trouble) for trouble in learner.get("trouble", ())]
    if "attempts" not in learner:  # it has not loaded its drafter
        return found
    attempts = f"{learner['attempts']}, of which {learner['promotions']} promoted"
    if learner["refusals"]:
        attempts += f"; the last {learner['refusals']} refused"
    found += [
        ("attempts", attempts),
        ("last decision", learner["decision"] or "none yet"),
        ("next attempt", learner["next"] or "none is due"),
        ("new tokens", f"{learner['fresh_tokens']:,} since the last attempt"),
        ("drift score", _listed(learner["drift"])),
        ("requests kept", _listed({domain: sum(roles.values()) for domain, roles in learner["kept"].items()})),
    ]
    return found


def _convergence(report: Mapping[str, Any]) -> str:
    """How many replicas are at the version that they should serve, and who serves what else."""
    champion, canary = report["champion"], report["canary"]
    ahead = {f"replica:{canary['replica']}": canary["pointer"]["version"]} if canary else {}
    served = {name: s["drafter_version"] for name, s in report["replicas"].items() if s.get("drafter_version")}
    wanted = {name: ahead.get(name, champion["version"] if champion else "base") for name in served}
    others = [f"{name.rpartition(':')[2].rpartition('#')[2]} {v}" for name, v in served.items() if v != wanted[name]]
    said = f"{len(served) - len(others)} of {len(served)} replicas at their version"
    said += f"; canary {canary['pointer']['version']} on {canary['replica'].rpartition('#')[2]}" if canary else ""
    return said + (f"; not yet: {', '.join(others)}" if others else "")


def _traces(report: Mapping[str, Any]) -> Table:
    stream, counters = report["stream"], Counters(report["counters"])
    mlflow = (report["learner"] or {}).get("mlflow") or {}
    lost = {name: counters.total(name) + stream.get(name, 0) + mlflow.get(name, 0) for name in _LOST}
    table = Table("", "", title="Traces", title_justify="left", show_header=False)
    table.add_row("in the stream", f"{stream['length']:,}")
    table.add_row("to be read", f"{stream['lag']:,}, and {stream['pending']:,} read but not yet kept")
    for name, count in lost.items():
        if count:
            table.add_row("lost", f"[yellow]{count:,.0f} {_LOST[name]}[/]")
    if not any(lost.values()):
        table.add_row("lost", "none")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,g}" for name, value in values.items()) or "none yet"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} seconds ago"
