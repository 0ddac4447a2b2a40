"""`<home>/run`: the lock that keeps one stack to a home, and `stack.json`, by which other commands find the stack."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shared.config import Config
from shared.errors import ConfigError, ServiceDown


@dataclass(frozen=True)
class RunningStack:
    api: str  # URLs
    mlflow: str
    redis: str
    pid: int  # of the command that owns the stack
    children: dict[str, int]  # name -> pid
    started_at: float  # seconds since the epoch


def write_run_file(home: Path, stack: RunningStack) -> None:
    partial = _path(home).with_suffix(".partial")
    partial.write_text(json.dumps(asdict(stack), indent=2) + "\n", encoding="utf-8")
    partial.replace(_path(home))


def read_run_file(home: Path) -> RunningStack | None:
    """The stack that runs in this home, or None; a file left by a killed one does not count."""
    try:
        stack = RunningStack(**json.loads(_path(home).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return stack if psutil.pid_exists(stack.pid) else None


def redis_to_ask(config: Config, running: RunningStack | None, *, instead: str = "") -> str:
    """URL of the Redis that knows of the stack that is asked about.

    Raises ServiceDown where nothing runs and no server was named; `instead` is what else one could do.
    """
    url = config.redis.url or (running.redis if running else "")
    if not url:
        raise ServiceDown(f"nothing runs in {config.home_path}. Start it with `redraft up`{instead}.")
    return url


@contextmanager
def owned_home(home: Path) -> Iterator[None]:
    """Holds the home for one stack. Raises ConfigError when another has it; the kernel frees a dead one's."""
    folder = home / "run"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read_run_file(home)
            owner = f" (process {running.pid}, {running.api})" if running else ""
            raise ConfigError(
                "home", f"another stack runs in {home}{owner}", "Stop it, or set another home (REDRAFT_HOME)."
            ) from None
        try:
            yield
        finally:
            _path(home).unlink(missing_ok=True)


def _path(home: Path) -> Path:
    return home / "run" / "stack.json"
