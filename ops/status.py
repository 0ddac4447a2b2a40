"""`redraft status`: what a running stack does, from Redis and /readyz, as tables (`ops.status_view`) or as JSON.

The JSON carries counts, never ratios. A neighbour that does not answer is a line
in the answer, not a failure of the command: that is what one asks a status for.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ops import settings
from ops.run_file import RunningStack, read_run_file, redis_to_ask
from ops.stack import ask_ready
from ops.status_view import render
from shared.config import Config
from shared.counters import Counters
from shared.errors import ServiceDown, Unreadable
from shared.store import Canary, Store

NOTHING_RUNS = 1


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object of counts, for scripts")


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    running = read_run_file(config.home_path)
    report = gather(config, running)
    if arguments.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        Console().print(render(report))
    return 0 if report["api"]["status"] or not report["redis"]["error"] else NOTHING_RUNS


def gather(config: Config, running: RunningStack | None) -> dict[str, Any]:
    """Everything that is shown. Raises ServiceDown when there is nothing to ask."""
    url = redis_to_ask(config, running)
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
        "domains": counters.alpha_rows(),
        "counters": counters.fields,
    }


def _canary(store: Store) -> Canary | None:
    try:
        return store.canary()
    except Unreadable:
        return None


def _json_or_text(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body
