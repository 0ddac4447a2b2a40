"""A running stack as its users meet it: over HTTP, in Redis, in MLflow, by `redraft status`, and by its processes.

`Traffic` keeps asking with prompts that never repeat and remembers every request that failed. Nothing here waits for a
time to pass: `until` waits for a fact.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, TypeVar

import httpx
import mlflow
import numpy as np
import psutil
import yaml

from ops.processes import Supervisor
from ops.run_file import RunningStack, read_run_file
from shared.config import Config
from shared.counters import Counters
from shared.store import Champion, Store

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0  # several test runs and a training may share the cores
WORKERS = 6  # requests that the traffic keeps open
T = TypeVar("T")


def until(fact: Callable[[], T | None], what: str, *, within_s: float = PATIENCE_S) -> T:
    """The first true value of `fact`."""
    deadline = time.monotonic() + within_s
    while not (found := fact()):
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.1)
    return found


@dataclass(frozen=True)
class Answer:
    text: str  # one word a token
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Ask:
    """One request whose answer must never change."""

    prompt: str
    fields: tuple[tuple[str, Any], ...]


class LiveStack:
    """A `redraft up` in another process. `words` is how many words its target's tokenizer knows."""

    def __init__(self, home: Path, orders: Path, words: int) -> None:
        self.home, self._orders, self._words = home, orders, words
        running = read_run_file(home)
        assert running is not None, "`redraft up` has said that it serves"
        self.running: RunningStack = running
        self.store = Store(running.redis, "redraft")
        self.mlflow = mlflow.MlflowClient(running.mlflow)
        self.model = httpx.get(f"{running.api}/v1/models", timeout=60).json()["data"][0]["id"]
        self._number = itertools.count()
        noise = np.random.default_rng(0)
        greedy: list[tuple[tuple[str, Any], ...]] = [(("temperature", 0.0),)] * 4
        seeded = [(("temperature", 1.0), ("seed", seed)) for seed in (0, 1, 2**40, -5)]
        self._asks = [Ask(self._words_of(noise), fields) for fields in (*greedy, *seeded)]

    # What a client sees

    def post(self, client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 24,
            "ignore_eos": True,
            "metadata": {"domain": "chat"},
            **fields,
        }
        return client.post(f"{self.running.api}/v1/chat/completions", json=body, timeout=120)

    def fixed_answers(self, **fields: Any) -> list[Answer]:
        """Answers to the greedy and the seeded requests that are the same every time."""
        with httpx.Client() as client:
            replies = [self.post(client, ask.prompt, max_tokens=40, **dict(ask.fields), **fields) for ask in self._asks]
        bodies = [reply.raise_for_status().json() for reply in replies]
        return [
            Answer(
                body["choices"][0]["message"]["content"],
                body["choices"][0]["finish_reason"],
                body["usage"]["completion_tokens"],
            )
            for body in bodies
        ]

    def drafter_of_an_answer(self) -> str:
        with httpx.Client() as client:
            body = self.post(client, self.new_prompt(), temperature=1.0).raise_for_status().json()
        version: str = body["metrics"]["speculative_decoding"]["drafter_version"]
        return version

    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.running.api}/readyz", timeout=60).raise_for_status().json()
        return found

    def new_prompt(self) -> str:
        return self._words_of(np.random.default_rng(1000 + next(self._number)))

    def _words_of(self, noise: np.random.Generator) -> str:
        return " ".join(f"w{number}" for number in noise.integers(0, self._words, 8))

    # What the loop's parts say

    def force(self, blob: bytes, reason: str) -> Champion:
        """Promotes an adapter that no gate has seen."""
        return Champion(**self.store.orders.ask("force", blob=self.store.put_blob(blob), reason=reason))

    def learner_state(self) -> dict[str, Any]:
        """As the actor itself says, whatever is in Redis. Raises RuntimeError with what it answered."""
        with Client(str(self._orders), "AF_UNIX") as connection:
            connection.send(("state", ()))
            worked, answer = connection.recv()
        if not worked:
            raise RuntimeError(answer)
        state: dict[str, Any] = answer
        return state

    def learner(self) -> dict[str, Any]:
        """The learner's heartbeat; empty while there is none."""
        return self.store.statuses().get("learner", {})

    def counters(self) -> Counters:
        return Counters.merge(self.store.counters().values())

    def status(self) -> dict[str, Any]:
        """`redraft status --json`."""
        shown = subprocess.run(
            [sys.executable, "-c", "from ops.cli import main; main(['status', '--json'])"],
            cwd=ROOT,
            env={**os.environ, "REDRAFT_HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(shown.stdout)
        return found

    # Its processes

    def pid_of(self, child: str) -> int:
        """Of the Redis or the MLflow that the stack has started last."""
        running = read_run_file(self.home)
        assert running is not None
        return running.children[child]

    def learner_pid(self) -> int:
        """0 while there is none."""
        for process in psutil.Process(self.running.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::LearnerActor"):
                    return process.pid
            except psutil.Error:
                continue
        return 0


class Traffic:
    """Sampled requests of one domain, `WORKERS` at a time, as long as the `with` block lasts."""

    def __init__(self, stack: LiveStack) -> None:
        self._stack, self._stop = stack, threading.Event()
        self.failures: list[str] = []
        self.answered = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(WORKERS)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client() as client:
            while not self._stop.is_set():
                with self._lock:
                    prompt = self._stack.new_prompt()
                try:
                    reply = self._stack.post(client, prompt, temperature=1.0)
                    problem = "" if reply.status_code == 200 else f"{reply.status_code} {reply.text}"
                except httpx.HTTPError as error:
                    problem = repr(error)
                with self._lock:
                    self.answered += 1
                    if problem:
                        self.failures.append(problem)


@contextmanager
def start_stack(config: Config, folder: Path, words: int) -> Iterator[LiveStack]:
    """`redraft up` with this configuration, in a process group of its own."""
    file, orders, log = folder / "redraft.yaml", folder / "orders", folder / "up.log"
    file.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    command = [sys.executable, "-u", "-m", "tests.e2e.up_with_orders", str(orders), "--config", str(file)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",  # as the stack sets it itself; this test session's own Ray has none
    }
    with Supervisor(folder) as supervisor:
        up = supervisor.start(
            "up",
            [*command, "--port", "0"],
            ready=lambda: "redraft status" in log.read_text(encoding="utf-8"),
            timeout_s=2 * PATIENCE_S,
            environment=environment,
        )
        stack = LiveStack(config.home_path, orders, words)
        try:
            yield stack
        finally:
            stack.store.close()
            up.process.terminate()
            up.process.wait(120)
