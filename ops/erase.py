"""`redraft erase`: removes one tenant from the loop: traces, features, and every drafter version learnt from them.

The learner does it; this asks through Redis, waits, and shows the receipt. Without a learner the request waits in
Redis, and only the stream is rid of the tenant at once. It does not opt the tenant out: `redraft keys policy` does.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from ops import settings
from ops.run_file import read_run_file
from shared.errors import ConfigError
from shared.keys import check_name
from shared.store import Store

UNFINISHED = 1
POLL_S = 0.2


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--tenant", required=True, metavar="NAME", help="whom to erase")
    parser.add_argument(
        "--wait-s", type=float, default=120.0, metavar="S", help="seconds that the learner has to answer"
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as one JSON object")


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    check_name("--tenant", arguments.tenant)
    running = read_run_file(config.home_path)
    url = config.redis.url or (running.redis if running else "")
    if not url:
        remedy = "Start one with `redraft up`, or name a Redis."
        raise ConfigError("redis.url", f"no stack runs in {config.home_path}", remedy)
    store = Store(url, config.redis.prefix)
    try:
        receipt = erase(store, arguments.tenant, arguments.wait_s)
    finally:
        store.close()
    if receipt is None:
        print(
            f"The learner has not answered within {arguments.wait_s:g} s. The stream is rid of {arguments.tenant}; the "
            "request waits in Redis until the learner has done the rest. Ask again to see it.",
            file=sys.stderr,
        )
        return UNFINISHED
    print(json.dumps(receipt, indent=2) if arguments.json else _said(arguments.tenant, receipt))
    return 0


def erase(store: Store, tenant: str, wait_s: float) -> dict[str, Any] | None:
    """The learner's receipt; None if it has given none by then. Raises ServiceDown."""
    asked_at = time.time()
    store.ask_erasure(tenant, asked_at)
    store.sweep_traces(asked_at, tenant)
    deadline = time.monotonic() + wait_s
    while True:
        receipt = store.erasure_receipt(tenant)
        if receipt is not None or time.monotonic() >= deadline:
            return receipt
        time.sleep(POLL_S)


def _said(tenant: str, receipt: dict[str, Any]) -> str:
    versions = ", ".join(receipt["versions"]) or "none had learnt from it"
    mlflow = {
        "none": "there is none",
        "waits": "the learner deletes them there as soon as it answers",
        "erased": "they are deleted there too",
    }[receipt["mlflow"]]
    return (
        f"{tenant} is erased: {receipt['records']} records of the learner's buffer.\n"
        f"Versions withdrawn: {versions}. The champion is {receipt['champion']}. In MLflow: {mlflow}.\n"
        f"On disk: {receipt['disk']}.\n"
        f"Later requests are traced again unless you say `redraft keys policy {tenant} --traces off`."
    )
