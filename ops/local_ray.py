"""The Ray of the local stack: one node in this process's name, gone with it.

Ray listens on every interface, so the cluster takes only calls that carry a token, made anew for each stack. Its
state is disposable: a rebuilt cluster finds its champion in Redis.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from ops.processes import Supervisor
from shared.config import Config

NAMESPACE = "redraft"
OBJECT_STORE_BYTES = 512 * 2**20  # features on their way to the learner
SPARE_CPUS = 1.0  # for short tasks of Serve's
_STARTS = 3  # attempts
_SESSIONS_KEPT = 2  # older logs are removed at the start
# A socket's path has at most 107 bytes, of which Ray's session and socket names take up to 64.
_LONGEST_FOLDER = 42


def start_ray(supervisor: Supervisor, config: Config) -> None:
    """Starts a cluster of this machine only; the supervisor shuts it down."""
    folder = _folder(supervisor, config.home_path / "ray")
    _drop_old_sessions(folder)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        # A replica that reserves no GPU still sees the devices; `target.device` decides what it uses.
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    os.environ.pop("RAY_ADDRESS", None)  # somebody else's cluster
    import ray  # takes a second, and reads its settings from the environment

    terminate = signal.getsignal(signal.SIGTERM)
    supervisor.on_exit(ray.shutdown)
    init_patiently(
        address="local",
        namespace=NAMESPACE,
        # Reservations only decide what may be placed, so all of ours must fit, on a small machine too.
        num_cpus=max(os.cpu_count() or 1, math.ceil(_reserved_cpus(config))),
        num_gpus=None if config.serve.replica_gpus or config.learner.gpus else 0,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )
    # Ray puts a handler of its own there; ending is the business of whoever started the stack.
    signal.signal(signal.SIGTERM, terminate)


def init_patiently(**settings: Any) -> None:
    """`ray.init`, again when a busy machine took longer than the 30 s that Ray gives a node to start."""
    import ray

    for left in reversed(range(_STARTS)):
        try:
            ray.init(**settings)
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def _reserved_cpus(config: Config) -> float:
    return config.serve.replicas * config.serve.replica_cpus + config.learner.cpus + SPARE_CPUS


def _folder(supervisor: Supervisor, wanted: Path) -> Path:
    if len(os.fsencode(wanted)) <= _LONGEST_FOLDER:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    folder = Path(tempfile.mkdtemp(prefix="redraft-ray-", dir="/tmp"))
    supervisor.on_exit(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def _drop_old_sessions(folder: Path) -> None:
    sessions = sorted(path for path in folder.glob("session_2*") if path.is_dir() and not path.is_symlink())
    for path in sessions[: -_SESSIONS_KEPT or None]:
        shutil.rmtree(path, ignore_errors=True)
