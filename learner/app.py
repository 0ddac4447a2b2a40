"""The learner as a Ray actor: one a cluster, found by name, started again by Ray whenever it dies.

Owns nothing but the process: threads, priority, and the thread that runs the loop. A restarted actor goes on from the
buffer on disk. Where nobody calls
`start`, as on Kubernetes, `build` makes a Serve application without a route that keeps the actor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from numpy.typing import NDArray
from ray import serve

from learner.keeper import Keeper
from learner.loop import LearnerLoop
from learner.metrics import RayMetrics
from shared.config import Config, config_from_dict, load_config
from shared.openmp import openmp_environment

ACTOR, NAMESPACE = "redraft-learner", "redraft"
CALLS = 16  # that run beside each other: features of several replicas, questions, orders
NICENESS = 5  # serving goes first
DEPLOYMENT = "LearnerKeeper"
ANSWER_S, STOP_S = 5.0, 35.0  # of the actor: to a question; to the order to end
TEND_S, TEND_TIMEOUT_S = 5.0, 60.0

log = logging.getLogger(__name__)


class LearnerActor:
    """`session` names one life of the stack; it stays when Ray restarts the actor."""

    def __init__(self, config: Mapping[str, Any], session: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._loop = LearnerLoop(config_from_dict(config), session=session, watch=RayMetrics().show)
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def features(self, id: str, features: NDArray[np.float16]) -> None:
        """[prompt + n - 1, layers * target_hidden] of a finished request; copied before this returns."""
        self._loop.inbox.put(id, features)

    def measurements(self, after: int) -> list[dict[str, Any]]:
        """Measured requests with an order above `after`, oldest first, a thousand at most."""
        return self._loop.measurements(after)

    def state(self) -> dict[str, Any]:
        """The last heartbeat."""
        return self._loop.status

    def settings(self) -> dict[str, Any]:
        """The configuration that it was started with."""
        return self._loop.config.to_dict()

    def stop(self) -> None:
        """Ends the loop in good order; the actor stays until it is killed."""
        self._loop.stop()
        self._thread.join(30)

    def _run(self) -> None:
        import torch

        # Niceness and torch's threads belong to the thread that asks, and to those that it starts.
        os.nice(NICENESS)
        torch.set_num_threads(self._loop.config.learner.threads)
        self._loop.run()


def start(config: Config) -> Any:
    """The handle of the learner in the Ray that this process is connected to; starts it unless it is there."""
    learner = config.learner
    actor = ray.remote(LearnerActor).options(
        name=ACTOR,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",  # whoever started it may leave
        max_restarts=-1,
        max_concurrency=CALLS,
        num_cpus=learner.cpus,
        num_gpus=learner.gpus,
        resources={learner.resource: 1} if learner.resource else {},
        runtime_env={"env_vars": openmp_environment(learner.threads, alone=False)},
    )
    return actor.remote(config.to_dict(), uuid4().hex)


class RayActors:
    """The actor of this cluster, for the keeper."""

    def exists(self) -> bool:
        return self._handle() is not None

    def settings(self) -> Mapping[str, Any] | None:
        actor = self._handle()
        try:
            return None if actor is None else dict(ray.get(actor.settings.remote(), timeout=ANSWER_S))
        except ray.exceptions.RayError:  # it is pending, dying or busy
            return None

    def start(self, config: Config) -> None:
        start(config)

    def end(self) -> None:
        actor = self._handle()
        if actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=STOP_S)
            ray.kill(actor, no_restart=True)

    def _handle(self) -> Any:
        try:
            return ray.get_actor(ACTOR, namespace=NAMESPACE)
        except ValueError:
            return None


class LearnerKeeper:
    """A Serve replica that answers nobody. Serve's health checks are its clock, and move it to another node in need.

    The actor outlives it, so that a keeper that is moved or started again interrupts no training.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO)
        self._keeper = Keeper(config_from_dict(config), RayActors())

    async def check_health(self) -> None:
        await asyncio.to_thread(self._keeper.tend)


def application(config: Config) -> serve.Application:
    """The Serve application that keeps the learner of this configuration. It reserves nothing itself."""
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1,
        health_check_period_s=TEND_S,
        health_check_timeout_s=TEND_TIMEOUT_S,
        graceful_shutdown_timeout_s=1,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(LearnerKeeper).bind(config.to_dict())


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Entry point of Serve config files: `import_path: learner.app:build`, with the same `args` as the serving one."""
    return application(load_config(overrides=dict(arguments)))
