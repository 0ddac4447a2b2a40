"""One contender's process: `python -m ops.bench_worker`, told what to do by `ops.tasks`.

Memory and threads are the contender's own, and only one of them works at a time.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ops.bench_line_up import Contender
from ops.bench_measure import Measure, Messages
from ops.tasks import answer_tasks
from shared.config import Config, config_from_dict
from shared.models.huge_pages import bytes_on_huge_pages


class Backend(Protocol):
    """A loaded contender. `facts` holds drafter, weights, weight_bytes (0: unknown), threads, perhaps a version."""

    facts: dict[str, Any]

    def run(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> Measure: ...

    def stop(self) -> None: ...


def main() -> None:
    worker = _Worker()
    try:
        answer_tasks(lambda task, _: worker.do(task))
    finally:
        worker.stop()


class _Worker:
    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._tasks: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "load": self._load,
            "run": self._run,
            "arrive": self._arrive,
            "swap": self._swap,
            "memory": self._memory,
            "bandwidth": self._bandwidth,
        }

    def do(self, task: Mapping[str, Any]) -> dict[str, Any]:
        return self._tasks[task["do"]](task)

    def stop(self) -> None:
        if self._backend is not None:
            self._backend.stop()

    def _load(self, task: Mapping[str, Any]) -> dict[str, Any]:
        contender = Contender.from_dict(task["contender"])
        _use_threads(contender, int(task["threads"]))
        self._backend = _backend(contender, config_from_dict(task["config"]), task)
        return {"facts": self._backend.facts}

    def _run(self, task: Mapping[str, Any]) -> dict[str, Any]:
        assert self._backend is not None
        measure = self._backend.run(task["conversations"], task["domain"], task["max_tokens"])
        return {"measure": measure.to_dict()}

    def _arrive(self, task: Mapping[str, Any]) -> dict[str, Any]:
        from ops.bench_arrivals import poisson
        from ops.bench_engine import OwnEngine

        assert isinstance(self._backend, OwnEngine)
        due = poisson(len(task["conversations"]), task["rate"], task["seed"])
        measure = self._backend.load(task["conversations"], task["domain"], task["max_tokens"], due)
        return {"measure": measure.to_dict()}

    def _swap(self, task: Mapping[str, Any]) -> dict[str, Any]:
        from ops.bench_engine import OwnEngine

        assert isinstance(self._backend, OwnEngine)
        return {"swap": self._backend.swap(task["conversations"], task["domain"], task["max_tokens"])}

    def _memory(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Bytes: the most that this process ever held (loading included), what it holds now, and on huge pages."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        now = pages * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak": peak, "now": now, "huge": bytes_on_huge_pages()}

    def _bandwidth(self, task: Mapping[str, Any]) -> dict[str, Any]:
        from ops.bench_bandwidth import read_bandwidth

        return {"bytes_s": read_bandwidth(task["threads"])}


def _use_threads(contender: Contender, threads: int) -> None:
    if contender.kind not in ("server", "llama.cpp"):
        import torch

        torch.set_num_threads(threads)


def _backend(contender: Contender, config: Config, job: Mapping[str, Any]) -> Backend:
    if contender.kind == "server":
        from ops.bench_server import Server

        return Server(contender, config, job)
    if contender.kind == "llama.cpp":
        from ops.bench_llama import LlamaCpp

        return LlamaCpp(contender, config, job)
    if not contender.ours:
        from ops.bench_transformers import TransformersGenerate

        return TransformersGenerate(contender, config, job)
    from ops.bench_drafters import own_config
    from ops.bench_engine import OwnEngine

    return OwnEngine(contender, own_config(contender, config, Path(job["folder"])), job)


if __name__ == "__main__":
    main()
