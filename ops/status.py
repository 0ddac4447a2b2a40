"""`redraft status`: what a running stack does, from Redis and /readyz, as tables or as JSON.

The JSON carries counts, never ratios; α is computed where it is shown. A neighbour that does not answer is a line
in the answer, not a failure of the command: that is what one asks a status for.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from ops import settings
from ops.run_file import RunningStack, read_run_file
from ops.stack import ask_ready
from shared.config import Config
from shared.counters import Counters
from shared.errors import ConfigError, ServiceDown, Unreadable
from shared.store import Canary, Store

NOTHING_RUNS = 1


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    running = read_run_file(config.home_path)
    report = gather(config, running)
    console = Console()
    if arguments.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        console.print(render(report))
    return 0 if report["api"]["status"] or not report["redis"]["error"] else NOTHING_RUNS


def gather(config: Config, running: RunningStack | None) -> dict[str, Any]:
    """Everything that is shown. Raises ConfigError when there is nothing to ask."""
    url = config.redis.url or (running.redis if running else "")
    if not url:
        raise ConfigError(
            "redis.url", f"no stack runs in {config.home_path}", "Start one with `redraft up`, or name a Redis."
        )
    api = running.api if running else f"http://{config.serve.host}:{config.serve.port}"
    status, body = ask_ready(api)
    report: dict[str, Any] = {
        "api": {"url": api, "status": status, "answer": _json_or_text(body)},
        "mlflow": {"url": running.mlflow if running else config.mlflow.tracking_uri},
        "redis": {"url": url, "error": ""},
        "stack": asdict(running) if running else None,
    }
    store = Store(url, config.redis.prefix)
    try:
        report |= _from_redis(store)
    except ServiceDown as error:
        report["redis"]["error"] = str(error)
    finally:
        store.close()
    return report


def _from_redis(store: Store) -> dict[str, Any]:
    champion, statuses = store.champion(), store.statuses()
    learner = statuses.pop("learner", None)
    counters, canary = Counters.merge(store.counters().values()), _canary(store)
    return {
        "champion": asdict(champion) if champion else None,
        "canary": asdict(canary) if canary else None,
        "learner": learner,
        "replicas": statuses,
        "stream": asdict(store.stream_depth()),
        "domains": _by_domain_and_version(counters),
        "counters": counters.fields,
    }


def _canary(store: Store) -> Canary | None:
    try:
        return store.canary()
    except Unreadable:
        return None


def _by_domain_and_version(counters: Counters) -> list[dict[str, Any]]:
    rows = []
    for domain in counters.tag_values("domain"):
        for version in counters.tag_values("version"):
            accepted, tested = counters.alpha_counts(domain=domain, version=version)
            if tested:
                rows.append({"domain": domain, "version": version, "accepted": accepted, "tested": tested})
    return rows


def render(report: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_services(report)]
    if not report["redis"]["error"]:
        parts += [_alpha(report["domains"]), _replicas(report["replicas"]), _loop(report)]
    return Group(*parts)


def _services(report: dict[str, Any]) -> Table:
    api, answer = report["api"], report["api"]["answer"]
    state = answer.get("status", "") if isinstance(answer, dict) else f"no answer ({answer})"
    table = Table(title="Services", title_justify="left")
    for column in ("service", "url", "state"):
        table.add_column(column, overflow="fold")
    table.add_row("api", api["url"], state)
    table.add_row("redis", report["redis"]["url"], report["redis"]["error"] or "answers")
    table.add_row("mlflow", report["mlflow"]["url"], "")
    return table


def _alpha(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="α by domain and drafter version", title_justify="left")
    for column in ("domain", "version", "accepted", "tested", "α"):
        table.add_column(column, justify="left" if column in ("domain", "version") else "right")
    for row in rows:
        alpha = f"{row['accepted'] / row['tested']:.3f}"
        table.add_row(row["domain"], row["version"], f"{row['accepted']:.0f}", f"{row['tested']:.0f}", alpha)
    if not rows:
        table.add_row("(nothing drafted yet)", "", "", "", "")
    return table


def _replicas(replicas: dict[str, dict[str, Any]]) -> Table:
    table = Table("replica", "state", title="Replicas", title_justify="left")
    for name, status in replicas.items():
        # Serve's names end in what tells replicas apart.
        short = name.rpartition("#")[2] if "#" in name else name
        table.add_row(short, ", ".join(f"{field} {_say(value)}" for field, value in status.items()))
    if not replicas:
        table.add_row("(no heartbeat)", "")
    return table


def _loop(report: dict[str, Any]) -> Table:
    table = Table("", "", title="Learning loop", title_justify="left", show_header=False)
    champion = report["champion"]
    if champion is None:
        table.add_row("champion", "the base drafter: nothing has been promoted")
    else:
        age = time.time() - champion["created_at"]
        table.add_row("champion", f"{champion['version']} (no. {champion['number']}, {age:.0f} s ago)")
        table.add_row("before it", champion["previous"] or "the base drafter")
    table.add_row("serving", _convergence(report))
    for name, value in (report["learner"] or {"learner": "no heartbeat"}).items():
        table.add_row(name, _say(value))
    stream = report["stream"]
    table.add_row("stream", ", ".join(f"{name} {count}" for name, count in stream.items()))
    return table


def _convergence(report: dict[str, Any]) -> str:
    """How many replicas are at the version that they should serve, and who serves what else."""
    champion, canary = report["champion"], report["canary"]
    ahead = {f"replica:{canary['replica']}": canary["pointer"]["version"]} if canary else {}
    served = {name: s["drafter_version"] for name, s in report["replicas"].items() if s.get("drafter_version")}
    wanted = {name: ahead.get(name, champion["version"] if champion else "base") for name in served}
    others = [f"{name.rpartition(':')[2].rpartition('#')[2]} {v}" for name, v in served.items() if v != wanted[name]]
    said = f"{len(served) - len(others)} of {len(served)} replicas at their version"
    said += f"; canary {canary['pointer']['version']} on {canary['replica'].rpartition('#')[2]}" if canary else ""
    return said + (f"; not yet: {', '.join(others)}" if others else "")


def _say(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_or_text(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body
