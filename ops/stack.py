"""The embedded local stack: Redis, MLflow, Ray, the served application and the learner, as one context manager.

Parts start in the order of their needs and end in reverse; nothing outlives the process (see `ops.processes`). What
was found out at the start (ports, URLs) makes a new Config, which every part gets; the given one stays as it was.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ops.local_mlflow import start_mlflow
from ops.local_ray import start_ray
from ops.local_redis import start_redis
from ops.ports import choose_port
from ops.prepare import Preparation
from ops.processes import Supervisor
from ops.run_file import RunningStack, owned_home, write_run_file
from shared.config import Config, ServeConfig
from shared.keys import access_of

LEARNER_STOP_S = 8.0  # an attempt in the middle of a training step takes a moment to notice


@dataclass(frozen=True)
class Urls:
    api: str
    mlflow: str
    redis: str


class Stack:
    """`with Stack(config) as stack:` serves at `stack.urls.api`; `stack.config` names what was found."""

    def __init__(
        self, config: Config, *, named: Collection[str] = (), say: Callable[[str], None] = lambda _: None
    ) -> None:
        """`named` are the keys that a person set (a named port that is taken is an error); `say` hears of progress."""
        self.config = config
        self.urls = Urls("", "", "")
        # A port that differs from the default has been named by somebody, whoever it was.
        self._port_is_named = "serve.port" in named or config.serve.port != ServeConfig().port
        self._say = say
        self._cleanups = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends everything, what was started last first. A second call does nothing."""
        # Ray prints on our standard output whatever dies on the way, and at the end everything does.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            self._cleanups.close()

    def tend(self) -> list[str]:
        """Starts Redis and MLflow again if they have died; to be called every second or so. Names those started."""
        started = self.supervisor.revive()
        if started:
            self._write_run_file()
        return started

    def _start(self) -> None:
        config = self.config
        self.access = access_of(config)  # before anything is started
        self._cleanups.enter_context(owned_home(config.home_path))
        serve = config.serve
        port = choose_port("serve.port", serve.host, serve.port, named=self._port_is_named)
        self.supervisor = self._cleanups.enter_context(Supervisor(config.home_path / "logs"))
        preparation = Preparation(config)
        self.supervisor.on_exit(preparation.stop)
        redis = start_redis(self.supervisor, config)
        mlflow = start_mlflow(self.supervisor, config)
        self.config = config = replace(
            config,
            serve=replace(serve, port=port),
            redis=replace(config.redis, url=redis),
            mlflow=replace(config.mlflow, tracking_uri=mlflow),
        )
        self.urls = Urls(_api_url(serve.host, port), mlflow, redis)
        self._say(f"Redis {redis}, MLflow {mlflow}")
        preparation.wait()
        start_ray(self.supervisor, config)
        self._say("Ray runs; loading the target")
        start_serving(self.supervisor, config)
        if config.learner.enabled:
            start_learner(self.supervisor, config)
        self._started_at = time.time()
        self._write_run_file()

    def _write_run_file(self) -> None:
        children = {child.name: child.pid for child in self.supervisor.children}
        running = RunningStack(**vars(self.urls), pid=os.getpid(), children=children, started_at=self._started_at)
        write_run_file(self.config.home_path, running)


def start_serving(supervisor: Supervisor, config: Config) -> None:
    """Deploys the application into the running Ray and waits until it serves; the supervisor drains and removes it."""
    from serving.app import deploy, shutdown

    supervisor.on_exit(shutdown)
    deploy(config)


def start_learner(supervisor: Supervisor, config: Config) -> None:
    """Starts the learner actor in the running Ray; the supervisor lets it close its runs and its database."""
    import ray

    from learner.app import start

    learner = start(config)

    def stop() -> None:
        # One that does not answer in time ends with Ray: it resumes after a kill as well.
        with suppress(ray.exceptions.RayError):
            ray.get(learner.stop.remote(), timeout=LEARNER_STOP_S)

    supervisor.on_exit(stop)


def ask_ready(api: str) -> tuple[int, str]:
    """HTTP status (0 when nothing answers) and body of /readyz."""
    try:
        with urllib.request.urlopen(f"{api}/readyz", timeout=5) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:  # URLError is one
        return 0, str(error)


def _api_url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"
