"""Runs the contenders side by side: every group of prompts is answered by all of them in turn before the next is.

Each has a worker process for the whole run, and the order changes from turn to turn, so that whatever drifts in the
machine meets all alike. Only the worker that is asked computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ops.bench_line_up import Contender
from ops.bench_measure import Measure
from ops.bench_prompts import Cell, cells
from ops.bench_settings import BenchSettings
from ops.task_process import Worker
from shared.errors import RedraftError

BENCH_WORKER = "ops.bench_worker"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One timed call."""

    contender: str
    batch: int
    domain: str
    unit: int
    repeat: int
    measure: Measure


@dataclass
class Findings:
    """What a run has measured so far."""

    contenders: list[Contender]
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by contender, what its worker said of itself
    memory: dict[str, Mapping[str, int]] = field(default_factory=dict)  # bytes: peak, now
    bandwidth: float = 0.0  # bytes a second
    results: list[Result] = field(default_factory=list)
    swaps: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # contender -> why it left the run
    complete: bool = False


class BenchRun:
    """`findings` grows while it runs, so that an interrupted run keeps what it has."""

    def __init__(self, settings: BenchSettings, contenders: Sequence[Contender], folder: Path, say: Say) -> None:
        self.findings = Findings(list(contenders))
        self._settings, self._folder, self._say = settings, folder, say
        self._cells = self._plan()
        self._workers: dict[str, Worker] = {}

    @property
    def calls(self) -> int:
        """Timed calls in all, unless a contender drops out."""
        return self._settings.repeats * sum(
            contender.takes(cell.batch) for cell in self._cells for contender in self.findings.contenders
        )

    def __call__(self, advance: Callable[[str], None]) -> None:
        """Everything. Raises RedraftError when none of the contenders is left."""
        with ExitStack() as stack:
            self._read_bandwidth()
            for contender in self.findings.contenders:
                self._start(contender, stack)
            for contender in self._live():
                self._attempt(self._warm_up, contender)
            for repeat in range(self._settings.repeats):
                self._answer_all(repeat, advance)
            for contender in self._live():
                self.findings.memory[contender.name] = self._memory(contender)
            self.findings.complete = True

    def _answer_all(self, repeat: int, advance: Callable[[str], None]) -> None:
        """Every group, by everybody in turn."""
        for place, cell in enumerate(self._cells):
            able = [contender for contender in self._live() if contender.takes(cell.batch)]
            for contender in rotated(able, repeat * len(self._cells) + place):
                advance(f"{repeat + 1}/{self._settings.repeats} · {cell.batch} × {cell.domain} · {contender.name}")
                self._attempt(self._measure, contender, cell, repeat)
        if self._settings.swap:
            for contender in self._live():
                if contender.drafts:
                    self._attempt(self._swap, contender)

    def _plan(self) -> list[Cell]:
        settings = self._settings
        if settings.rate is None:
            return cells(settings.conversations, settings.batches, settings.count)
        # An open loop has no groups: all prompts of a domain arrive, one after the other.
        return [
            Cell(settings.largest_batch, domain, 0, found[: settings.count])
            for domain, found in settings.conversations.items()
        ]

    def _live(self) -> list[Contender]:
        return [contender for contender in self.findings.contenders if contender.name in self._workers]

    def _read_bandwidth(self) -> None:
        threads = self._settings.threads
        with Worker(BENCH_WORKER, "bandwidth", self._folder / "bandwidth.log", threads=threads, own=False) as worker:
            self.findings.bandwidth = float(worker.ask("bandwidth", threads=threads)["bytes_s"])

    def _start(self, contender: Contender, stack: ExitStack) -> None:
        settings, number = self._settings, len(self._workers)
        self._say(f"loading {contender.name}")
        log = self._folder / f"{number}.log"
        worker = stack.enter_context(
            Worker(BENCH_WORKER, contender.name, log, threads=settings.threads, own=contender.ours)
        )
        self._workers[contender.name] = worker
        self.findings.facts[contender.name] = worker.ask(
            "load",
            contender=contender.to_dict(),
            config=settings.config.to_dict(),
            threads=settings.threads,
            batch=settings.largest_batch,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
            conversations=[messages for found in settings.conversations.values() for messages in found],
            folder=str(self._folder / f"head-{number}"),
        )["facts"]

    def _warm_up(self, contender: Contender) -> None:
        """Each batch size once, shortly: caches fill, costs are learnt, a server compiles what it compiles."""
        self._say(f"warming up {contender.name}")
        for cell in self._cells:
            if cell.unit == 0 and contender.takes(cell.batch):
                tokens = min(self._settings.warmup_tokens, self._settings.max_tokens)
                self._workers[contender.name].ask(
                    "run", conversations=list(cell.conversations), domain=cell.domain, max_tokens=tokens
                )

    def _measure(self, contender: Contender, cell: Cell, repeat: int) -> None:
        settings = self._settings
        task: dict[str, Any] = {
            "conversations": list(cell.conversations),
            "domain": cell.domain,
            "max_tokens": settings.max_tokens,
        }
        if settings.rate is not None:
            task.update(rate=settings.rate, seed=settings.seed + repeat)
        kind = "run" if settings.rate is None else "arrive"
        measure = Measure.from_dict(self._workers[contender.name].ask(kind, **task)["measure"])
        times = replace(measure.times, gaps_s=array("f", measure.times.gaps_s))  # by far the most numbers
        measure = replace(measure, times=times)
        self.findings.results.append(Result(contender.name, cell.batch, cell.domain, cell.unit, repeat, measure))

    def _swap(self, contender: Contender) -> None:
        cell = self._cells[0]
        found = self._workers[contender.name].ask(
            "swap",
            conversations=list(cell.conversations),
            domain=cell.domain,
            max_tokens=self._settings.max_tokens,
        )["swap"]
        self.findings.swaps.setdefault(contender.name, []).append(found)

    def _memory(self, contender: Contender) -> Mapping[str, int]:
        return {} if contender.kind == "server" else self._workers[contender.name].ask("memory")

    def _attempt(self, action: Callable[..., None], contender: Contender, *details: Any) -> None:
        """A contender that fails leaves the run; the others go on. Raises RedraftError when nobody is left."""
        try:
            action(contender, *details)
        except RedraftError as error:
            self._say(f"{contender.name} leaves the run: {error}")
            self.findings.failed[contender.name] = str(error)
            self._workers.pop(contender.name).kill()
            if not self._workers:
                raise


def rotated(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    """Everybody is first, second, ... equally often."""
    if not contenders:
        return []
    first = turn % len(contenders)
    return [*contenders[first:], *contenders[:first]]
