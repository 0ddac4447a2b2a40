"""The learner as a Ray actor: one a cluster, found by name, started again by Ray whenever it dies.

Owns nothing but the process: threads, priority, and the thread that runs the loop. A restarted actor goes on from the
buffer on disk. Errors of ours cross Ray as plain text, because they do not survive its pickling.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from numpy.typing import NDArray

from learner.loop import LearnerLoop
from shared.config import Config, config_from_dict
from shared.errors import RedraftError

ACTOR, NAMESPACE = "redraft-learner", "redraft"
CALLS = 16  # that run beside each other: features of several replicas, questions, orders
NICENESS = 5  # serving goes first

log = logging.getLogger(__name__)


class LearnerActor:
    """`session` names one life of the stack; it stays when Ray restarts the actor."""

    def __init__(self, config: Mapping[str, Any], session: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._loop = LearnerLoop(config_from_dict(config), session=session)
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

    def pause(self) -> None:
        """No attempt is begun; reading, measuring and reporting go on."""
        self._loop.pause()

    def resume(self) -> None:
        self._loop.resume()

    def force(self, blob: bytes, reason: str) -> dict[str, Any]:
        """Promotes an adapter blob without a gate, at an operator's word; returns the champion pointer."""
        return _plainly(lambda: asdict(self._loop.force(blob, reason)))

    def rollback(self, reason: str) -> dict[str, Any]:
        """Back to the version before the champion; returns the champion pointer."""
        return _plainly(lambda: asdict(self._loop.rollback(reason)))

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
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(learner.threads), "OMP_WAIT_POLICY": "PASSIVE"}},
    )
    return actor.remote(config.to_dict(), uuid4().hex)


def _plainly(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return action()
    except RedraftError as error:
        raise RuntimeError(str(error)) from None
