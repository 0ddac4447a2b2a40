"""A process that computes arms: `python -m ops.experiment_worker`, told what to do by `ops.tasks`.

It loads the base and the traffic once and keeps them from one arm to the next. It writes nothing but the temporary
files of the learner that it plays.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from learner.attempt import train_settings
from learner.base import Base, load_base
from learner.evaluator import Judged
from learner.trainer import Progress, train
from learner.tuning import LoraTuning
from ops.experiment_arms import ARMS, Arm
from ops.experiment_offline import Say, judge_all, run_offline, run_static
from ops.experiment_replay import Replay, look_back
from ops.experiment_result import ArmResult
from ops.experiment_traffic import Traffic, load
from ops.tasks import Tell, answer_tasks
from shared.config import Config, config_from_dict

_TIMED_RECORDS, _TIMED_STEPS = 8, 3
_TELL_S = 1.0


class _Worker:
    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._config: Config = config_from_dict(job["config"])
        torch.set_num_threads(self._config.learner.threads)
        base = load_base(self._config)
        assert base is not None, "the command has looked"
        self._base: Base = base
        self._folder, self._traffic = Path(job["data"]), Traffic.from_dict(job["traffic"])
        self._stream = load(self._folder, [id for domain in self._traffic.domains for id in domain.stream])

    def speeds(self) -> dict[str, float]:
        """Tokens a second of judging and of training, from a few records."""
        few = self._stream[:_TIMED_RECORDS]
        began = time.monotonic()
        judge_all(self._base.module, few, self._config, self._base)
        judged_s = time.monotonic() - began
        candidate = LoraTuning(self._config.learner).candidate(self._base, None, 0)
        settings = train_settings(self._config.learner, candidate, epochs=1.0, seed=0)
        seen: list[Progress] = []
        train(candidate, few, settings=replace(settings, steps=_TIMED_STEPS + 1), progress=seen.append)
        # The first step is left out: it sets up more than it learns.
        learnt = (seen[-1].tokens - seen[0].tokens) / (seen[-1].seconds - seen[0].seconds)
        return {"judged": sum(len(example.record.output_ids) for example in few) / judged_s, "learnt": learnt}

    def run(self, arm: Arm, static: Sequence[Judged], say: Say) -> ArmResult:
        job, config, base = self._job, self._config, self._base
        if arm.kind == "static":
            return run_static(arm, config, base, self._stream, say)
        if arm.kind == "offline":
            # Its share of every domain, and the same records in each larger share.
            shares = (domain.apart[: max(round(arm.share * len(domain.apart)), 1)] for domain in self._traffic.domains)
            data = load(self._folder, list(chain.from_iterable(shares)))
            return run_offline(arm, config, base, self._stream, data, job["passes"], job["seed"], say)
        apart = {domain.name: load(self._folder, domain.apart[: job["look_back"]]) for domain in self._traffic.domains}
        with tempfile.TemporaryDirectory(prefix=arm.name, dir=job["work"]) as folder:
            replay = Replay(
                arm,
                config,
                base,
                self._stream,
                static,
                served_per_s=job["served_per_s"],
                learnt_per_s=job["learnt_per_s"],
                full_learning_rate=job["full_learning_rate"],
                folder=Path(folder),
                say=lambda done, doing: say(0.9 * done, doing),
            )
            result = replay.run()
            return look_back(replay, result, config, base, apart, lambda done, doing: say(0.9 + 0.1 * done, doing))


def main() -> None:
    workers: list[_Worker] = []

    def do(task: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        if task["do"] == "load":
            workers.append(_Worker(task["job"]))
            return {}
        [worker] = workers
        if task["do"] == "speeds":
            return worker.speeds()
        told = 0.0

        def say(done: float, doing: str) -> None:
            nonlocal told
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                tell({"done": done, "doing": doing})

        static = [Judged(**row) for row in task["static"]]
        return {"result": worker.run(ARMS[task["arm"]], static, say).to_dict()}

    answer_tasks(do)


if __name__ == "__main__":
    main()
