"""Computes the arms that are not on disk yet, a few at once, each in a process with the learner's threads.

The static arm comes first, because the others are held against it. It says beforehand about how long everything takes,
from speeds measured here.
"""

from __future__ import annotations

import hashlib
import json
import queue
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from learner.base import Base
from ops.experiment_arms import ARMS, STATIC, Arm
from ops.experiment_result import ArmResult, ArmShelf
from ops.experiment_settings import ExperimentSettings
from ops.experiment_traffic import Traffic
from ops.task_process import Worker

_MODULE = "ops.experiment_worker"
_WAIT_S = 0.2


class ArmRun:
    def __init__(self, settings: ExperimentSettings, base: Base, traffic: Traffic, console: Console) -> None:
        self._settings, self._base, self._traffic, self._console = settings, base, traffic, console
        self._shelf = ArmShelf(settings.data / "arms")
        self._results: dict[str, ArmResult] = {}

    def __call__(self) -> dict[str, ArmResult]:
        """By arm, in their order. Each is on disk as soon as it is finished, so that it survives an interruption."""
        for arm in self._settings.arms:
            kept = self._shelf.get(arm, self.key(arm))
            if kept is not None:
                self._results[arm.name] = kept
                self._console.print(f"  {arm.name}: kept from an earlier run, {self._shelf.path(arm, self.key(arm))}")
        todo = [arm for arm in self._settings.arms if arm.name not in self._results]
        if todo:
            self._compute(todo)
        return {arm.name: self._results[arm.name] for arm in self._settings.arms}

    def _compute(self, todo: Sequence[Arm]) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="work-", dir=self._settings.data)))
            workers = [self._worker(number, folder, stack) for number in range(min(self._settings.jobs, len(todo)))]
            speeds = workers[0].ask("speeds")
            self._console.print(_estimate(self._costs(todo, speeds), len(workers)))
            self._share_out([arm for arm in todo if arm.name == STATIC], workers[:1])
            self._share_out([arm for arm in todo if arm.name != STATIC], workers)

    def key(self, arm: Arm) -> str:
        """Of everything that an arm's result depends on, but the code."""
        settings, config = self._settings, self._settings.config
        depends: dict[str, Any] = {
            "arm": {name: value for name, value in asdict(arm).items() if name != "meaning"},
            "traffic": self._traffic.sha256,
            "base": self._base.hash,
            "drafter": asdict(config.drafter),
        }
        if arm.kind != "static":
            depends |= {"learner": asdict(config.learner), "seed": settings.seed}
        if arm.kind == "offline":
            depends["passes"] = settings.passes
        if arm.kind == "online":
            depends |= {"gate": asdict(config.gate), "look_back": settings.look_back}
            depends["time"] = [settings.served_per_s, settings.learnt_per_s]
        if arm.full:
            depends["rate"] = settings.full_learning_rate
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]

    def _worker(self, number: int, folder: Path, stack: ExitStack) -> Worker:
        settings, threads = self._settings, self._settings.config.learner.threads
        worker = Worker(_MODULE, "an arm's process", folder / f"{number}.log", threads=threads, own=True)
        stack.callback(worker.kill)  # an arm may have minutes to go
        job = {name: getattr(settings, name) for name in _JOB}
        worker.ask(
            "load",
            job={
                **job,
                "config": settings.config.to_dict(),
                "data": str(settings.data),
                "work": str(folder),
                "traffic": self._traffic.to_dict(),
            },
        )
        return worker

    def _share_out(self, arms: Sequence[Arm], workers: Sequence[Worker]) -> None:
        """Longest first, so that no process is left alone with a long one at the end. Raises what an arm raised."""
        todo: queue.SimpleQueue[Arm] = queue.SimpleQueue()
        for arm in sorted(arms, key=lambda arm: (arm.kind == "online", arm.share), reverse=True):
            todo.put(arm)
        done: queue.SimpleQueue[ArmResult | BaseException] = queue.SimpleQueue()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[doing]}"), console=self._console, transient=True) as bars:
            for worker in workers:
                threading.Thread(target=self._work, args=(worker, todo, done, bars), daemon=True).start()
            for _ in arms:
                found = done.get()
                if isinstance(found, BaseException):
                    raise found
                self._keep(found)

    def _work(
        self,
        worker: Worker,
        todo: queue.SimpleQueue[Arm],
        done: queue.SimpleQueue[ArmResult | BaseException],
        bars: Progress,
    ) -> None:
        while True:
            try:
                arm = todo.get_nowait()
            except queue.Empty:
                return
            bar = bars.add_task(arm.name, total=1.0, doing="")

            def hear(facts: Mapping[str, Any], bar: Any = bar) -> None:
                bars.update(bar, completed=facts["done"], doing=facts["doing"])

            static = self._results[STATIC].judged if arm.kind == "online" else ()
            try:
                answer = worker.ask("arm", hear=hear, arm=arm.name, static=[asdict(judged) for judged in static])
                done.put(ArmResult.from_dict(answer["result"]))
            except BaseException as error:
                done.put(error)
                return
            finally:
                bars.remove_task(bar)

    def _keep(self, result: ArmResult) -> None:
        arm = ARMS[result.arm]
        self._shelf.put(arm, self.key(arm), result)
        self._results[arm.name] = result
        alpha = sum(j.first for j in result.judged) / max(sum(j.positions for j in result.judged), 1)
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
        self._console.print(f"  {arm.name}: α {alpha:.3f} over {len(result.judged)} records ({parts})")

    def _costs(self, arms: Sequence[Arm], speeds: Mapping[str, float]) -> dict[str, float]:
        """Seconds of each arm, about; of an online one at most."""
        settings, learner = self._settings, self._settings.config.learner
        tokens = sum(self._traffic.tokens)
        judging = tokens / speeds["judged"]
        apart = sum(domain.apart_tokens for domain in self._traffic.domains)
        found = {}
        for arm in arms:
            learnt, judged = 0.0, judging
            if arm.kind == "offline":
                learnt = settings.passes * arm.share * apart
            if arm.kind == "online":
                attempt_s = learner.attempt_tokens / settings.learnt_per_s
                attempts = min(tokens / (settings.served_per_s * attempt_s), tokens / learner.min_fresh_tokens)
                learnt = attempts * learner.attempt_tokens
                judged *= 3  # as they come, for the gate, and looking back
            found[arm.name] = learnt / speeds["learnt"] + judged
        return found


_JOB = ("passes", "seed", "served_per_s", "learnt_per_s", "full_learning_rate", "look_back")


def _estimate(costs: Mapping[str, float], at_once: int) -> Table:
    table = Table("arm", "about", title=f"What it takes, {at_once} at once")
    for name, seconds in costs.items():
        table.add_row(name, f"{seconds / 60:.1f} min")
    longest = max(costs.values())
    table.add_row("together", f"{max(sum(costs.values()) / at_once, longest) / 60:.1f} min", style="bold")
    return table
