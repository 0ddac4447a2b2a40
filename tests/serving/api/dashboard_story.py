"""Ten made-up minutes of a service, as its replicas and its learner would have left them in Redis.

`python -m tests.serving.api.dashboard_story FILE.png` takes the page's picture over them; `python -m tests.browser`
does so over a service that runs.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from ops.local_redis import find_server, launch_server
from ops.processes import Supervisor
from serving.api.router import create_app
from serving.api.service import Service
from serving.history import moment_of
from serving.overview import Overview, Own
from shared.counters import Counters
from shared.store import Champion, Store
from tests.browser import browser


def tell_a_story(store: Store, domains: tuple[str, str]) -> Own:
    """Ten minutes of two domains: the second begins after three, drifts after five, and is learnt by v2 after seven."""
    first, second = domains
    counters, now = Counters(), int(time.time()) // 10 * 10
    status: dict[str, Any] = {}
    for step in range(61):
        for domain, begins in ((first, 0), (second, 18)):
            if step < begins:
                continue
            accepted = 60 if domain == first or step > 42 else 20
            version = "v2" if step > 42 else "v1"
            counters.add("accepted", accepted, domain=domain, version=version)
            counters.add("tested", 100, domain=domain, version=version)
            counters.add("drafted", 150, domain=domain, version=version)
            counters.add("emitted", accepted + 50, domain=domain)
            counters.add("steps", 50, domain=domain)
        for depth in (1, 2, 3):
            counters.add(f"tested_at.{depth}", 60 - 10 * depth)
            counters.add(f"accepted_at.{depth}", 50 - 15 * depth)
        counters.add("gamma_at.0", 5)
        counters.add("gamma_at.3", 45)
        status = {
            "drafter_version": "v2" if step > 42 else "v1",
            "running": 2,
            "waiting": 1,
            "blocks_free": 48,
            "blocks_total": 64,
            "trace_queue": 0,
            "draining": False,
        }
        learner = {"drift": {second: 1.4 if 30 <= step <= 42 else 0.1}}
        at = now - 600 + 10 * step
        store.keep_moment(at, moment_of(counters, {"replica:x": status, "learner": learner}, at))
    store.set_champion(Champion("v2", "b", "base", "target", "eagle3", 2, "v1", now - 180.0))
    decisions = [
        {"at": now - 400.0, "attempt": 1, "outcome": "refused", "reason": f"kept: alpha of {second} is lost"},
        {"at": now - 180.0, "attempt": 2, "outcome": "promoted", "reason": "promoted: alpha 0.200 -> 0.600"},
    ]
    learner = {"state": "reading traces", "attempts": 2, "promotions": 1, "next": "", "drift": {second: 0.1}}
    store.put_status("learner", {**learner, "decisions": decisions, "trouble": [], "at": now}, ttl_s=600)
    return Own(counters.fields, status)


def main(file: Path) -> None:
    with TemporaryDirectory() as folder, Supervisor(Path(folder)) as supervisor:
        store = Store(launch_server(supervisor, find_server(), maxmemory=2**27), "story")
        mine = tell_a_story(store, ("chat", "sql"))
        app = create_app(Service("replica-1"), None, Overview("replica-1", store, lambda: mine))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        with browser() as page:
            page.look()
            page.open(f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard")
            page.until("document.querySelectorAll('#plot path').length === 3")  # all, chat, sql
            file.write_bytes(page.picture())
        server.should_exit = True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
