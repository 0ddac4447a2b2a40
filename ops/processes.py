"""Child processes that never outlive us: not after an exception, not after Ctrl-C, not after SIGKILL.

Three lines of defence: the supervisor ends its children in reverse order; the kernel sends them SIGTERM when the
thread that started them dies; a watchdog (`ops.reaper`) ends everything that carries our mark once we are gone.
It does not know what the children do beyond their command, their log and a readiness check.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ops import reaper
from shared.errors import ServiceDown

STOP_S = 10.0  # seconds for a child to end by itself
LOG_LINES = 15
_BACKOFF_S = (1.0, 30.0)  # first and longest wait before a dead child is started again

# Runs in the child: ask for SIGTERM at the parent's death, leave if that has already happened, become the command.
# A wrapper and not `preexec_fn`, which is unsafe in a process with threads, and we hold Ray's.
_TETHER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


@dataclass
class Child:
    """A started command; `process` changes when it is started again."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes]
    backoff_s: float = _BACKOFF_S[0]
    retry_at: float = field(default=0.0)  # monotonic seconds

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        """The last lines of the log, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"

    def stop(self, *, patience_s: float = STOP_S) -> None:
        """SIGTERM to the child's whole group, then SIGKILL."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, STOP_S)):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            try:
                self.process.wait(wait_s)
                return
            except subprocess.TimeoutExpired:
                continue


class Supervisor:
    """Owns a set of children, started and ended within a `with` block. Use it from the main thread.

    (The kernel ties SIGTERM-at-parent's-death to the *thread* that started the child.)
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._cleanups = ExitStack()
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        before = os.environ.get(reaper.MARK_VARIABLE)
        self._watchdog = self._start_watchdog()
        # In our own environment, for daemons that others start in our name (ray.init).
        os.environ[reaper.MARK_VARIABLE] = self._mark
        self._cleanups.callback(self._stop_watchdog)
        self._cleanups.callback(_restore, before)
        self._family = reaper.Family(self._mark)
        self._cleanups.callback(self._family.end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._family.look()  # who is whose child is only known while the parents live
        finally:
            self._cleanups.close()
            self.children.clear()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a command in its own process group and waits until `ready()`.

        Raises ServiceDown, with the end of the child's log, if it exits or is not ready in time.
        """
        log = self._log_folder / f"{name}.log"
        variables = {**os.environ, **(environment or {})}
        log.write_bytes(b"")
        child = Child(name, tuple(command), variables, log, _spawn(command, variables, log))
        self.children.append(child)
        self._cleanups.callback(child.stop)
        deadline = time.monotonic() + timeout_s
        while True:
            if not child.alive:
                problem = f"ended with exit code {child.process.returncode}"
            elif ready():
                return child
            elif time.monotonic() > deadline:
                problem = f"was not ready within {timeout_s:.0f} s"
            else:
                time.sleep(0.05)
                continue
            raise ServiceDown(f"{name} {problem}. The end of {log}:\n{child.log_tail()}")

    def on_exit(self, cleanup: Callable[[], object]) -> None:
        """Runs `cleanup` at the end, before what was started earlier is ended."""
        self._cleanups.callback(cleanup)

    def revive(self) -> list[str]:
        """Starts dead children again, each with growing pauses; returns the names of those started now."""
        started = []
        for child in self.children:
            if child.alive or time.monotonic() < child.retry_at:
                continue
            # Whatever it had started itself goes too: a web worker without its master would keep the port.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.retry_at = time.monotonic() + child.backoff_s
            child.backoff_s = min(2 * child.backoff_s, _BACKOFF_S[1])
            child.process = _spawn(child.command, child.environment, child.log)
            started.append(child.name)
        return started

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if name != reaper.MARK_VARIABLE}
        return subprocess.Popen(
            [sys.executable, "-I", str(Path(reaper.__file__)), self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=clean,
        )

    def _stop_watchdog(self) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )


def _restore(mark: str | None) -> None:
    if mark is None:
        os.environ.pop(reaper.MARK_VARIABLE, None)
    else:
        os.environ[reaper.MARK_VARIABLE] = mark
