"""A worker process as its owner sees it: ask, wait, answer. The other side is `ops.tasks`.

A worker that ends or answers with an error raises; the end of what it printed is part of the message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ops.tasks import TOLD, Tell
from shared.errors import RedraftError
from shared.openmp import openmp_environment

_TAIL_LINES = 12
_STOP_S = 10.0


class Worker:
    """Runs `module`. Started at once; use it in a `with` block."""

    def __init__(self, module: str, name: str, log: Path, *, threads: int, own: bool) -> None:
        self.name, self._log = name, log
        # Ours as a replica is started, but a value that the caller's environment has wins; peers as their library is.
        own_environment = openmp_environment(threads, alone=True) if own else {}
        environment = {**own_environment, **os.environ, "OMP_NUM_THREADS": str(threads)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
                start_new_session=True,  # a Ctrl-C is ours to act on
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ask(self, task: str, *, hear: Tell = lambda facts: None, **details: Any) -> Mapping[str, Any]:
        """Blocks until the worker has done it; `hear` gets what it tells meanwhile. Raises RedraftError."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead: reading says so
            self._process.stdin.write(json.dumps({"do": task, **details}) + "\n")
            self._process.stdin.flush()
        while TOLD in (answer := self._read()):
            hear(answer[TOLD])
        return answer

    def _read(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RedraftError(f"{self.name} ended with exit code {code}. The end of its output:\n{self._tail()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise RedraftError(f"{self.name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Its input ends, so it does; one that is in the middle of something is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert stream is not None
                stream.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Without waiting for what it does."""
        self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"
