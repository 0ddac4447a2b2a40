"""An attempt on real traffic of a tiny target: what is better is proven on later requests, what is not is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.attempt import Attempt, AttemptRunner, Prepare
from learner.bank import DrafterBank
from learner.base import Base, load_base
from learner.buffer import Arrival, Buffer
from learner.database import Database
from learner.evaluator import judge
from learner.example import Example
from learner.measure import Measurer
from shared.artifact import Artifact, open_blob, pack_blob
from shared.config import config_from_dict
from tests.learner.traffic import GAMMA, Served, TinyServing

FIRST, LATER = 50, 40  # requests before the snapshot and after


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def served(serving: TinyServing) -> list[Served]:
    return list(serving.serve(FIRST + LATER))


@pytest.fixture(scope="module")
def base(serving: TinyServing) -> Base:
    found = load_base(serving.config)
    assert found is not None
    return found


class Bench:
    """A buffer that holds the first requests; the later ones arrive while the attempt breathes."""

    def __init__(self, serving: TinyServing, base: Base, served: list[Served], path: Path, **settings: Any) -> None:
        tree = serving.config.to_dict()
        for key, value in settings.items():
            section, _, name = key.partition("__")
            tree[section][name] = value
        self.config, self.base, self._served = config_from_dict(tree), base, served
        self.database = Database(path / "buffer.sqlite")
        self.buffer = Buffer(self.database, recent=30, reservoir=60)
        self.artifacts: dict[str, Artifact] = {}
        self.bank = DrafterBank(base, self.artifacts.get)
        self.said: list[str] = []
        self.now = 0.0
        self._arrived = 0
        self.arrive(FIRST)

    def arrive(self, count: int) -> None:
        batch = self._served[self._arrived : self._arrived + count]
        measurer = Measurer(self.base, self.bank, gamma=GAMMA, champion=lambda: "base")
        measured = measurer.measure([Example(s.record, torch.from_numpy(s.features)) for s in batch])
        arrivals = [
            Arrival(f"{self._arrived + i}-0", s.data, s.record, s.features, found)
            for i, (s, found) in enumerate(zip(batch, measured, strict=True))
        ]
        self._arrived += len(batch)
        self.buffer.add(arrivals)

    def breathe(self, doing: str, wait_ms: int) -> None:
        self.said.append(doing)
        self.now += wait_ms / 1000
        if self._arrived < len(self._served):
            self.arrive(1)

    def run(
        self,
        *,
        number: int = 1,
        parent: str = "base",
        prepare: Prepare = lambda examples: examples,
        breathe: Callable[[str, int], None] | None = None,
    ) -> Attempt:
        runner = AttemptRunner(self.config, self.base, self.buffer, self.bank, prepare=prepare, clock=lambda: self.now)
        attempt = runner.run(
            number,
            focus=["chat"],
            name=f"v{number}",
            parent=parent,
            parent_artifact=self.artifacts.get(parent),
            breathe=breathe or self.breathe,
        )
        assert attempt is not None
        return attempt


Make = Callable[..., Bench]


@pytest.fixture
def bench(serving: TinyServing, base: Base, served: list[Served], tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(serving, base, served, tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for one in made:
        one.database.close()


def test_what_is_learnt_from_traffic_is_proven_on_later_traffic(bench: Make, served: list[Served]) -> None:
    mine = bench()
    attempt = mine.run()
    decision = attempt.decision
    assert decision.promote, decision.reason
    assert decision.gain.value > 0.05
    assert not attempt.undecided
    assert (attempt.parent, attempt.snapshot, attempt.number) == ("base", FIRST, 1)
    assert attempt.report.loss_last < attempt.report.loss_first
    assert attempt.report.tokens > 2 * mine.buffer.tokens(range(1, FIRST + 1)), "there is little, so it is used thrice"
    # What is promised is what the merged artifact does, on requests that the attempt has not seen at all.
    mine.artifacts["v1"] = open_blob(pack_blob(attempt.artifact))
    merged = mine.bank.get("v1")
    assert merged is not None
    unseen = [Example(s.record, torch.from_numpy(s.features)) for s in served[-20:]]
    found, before = (judge(module, unseen, GAMMA) for module in (merged, mine.base.module))
    alpha_before, alpha = (
        sum(j.accepted for j in judged) / sum(j.tested for j in judged) for judged in (before, found)
    )
    assert alpha > alpha_before + 0.05
    assert decision.alpha_candidate == pytest.approx(alpha, abs=0.06)


def test_an_attempt_that_is_killed_is_repeated_on_the_same_requests_to_the_same_candidate(bench: Make) -> None:
    whole, mine = bench(), bench()
    wanted = whole.run()

    def killed(doing: str, wait_ms: int) -> None:
        mine.breathe(doing, wait_ms)
        if "step 5 " in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine.run(breathe=killed)
    trained = {row["ord"] for row in mine.database.rows("SELECT ord FROM ledger WHERE trained")}
    mine.database.close()
    mine.database = Database(mine.database.path)
    mine.buffer = Buffer(mine.database, recent=2, reservoir=0)
    mine.arrive(4)  # by now the buffer would have dropped all of it
    again = mine.run()
    assert (again.snapshot, again.requests, again.window) == (wanted.snapshot, wanted.requests, wanted.window)
    assert {row["ord"] for row in mine.database.rows("SELECT ord FROM ledger WHERE trained")} == trained, (
        "nothing twice"
    )
    for name, tensor in wanted.artifact.tensors.items():
        assert torch.equal(again.artifact.tensors[name], tensor), name
    assert mine.buffer.begun_attempt(1) is not None
    mine.buffer.end_attempt()
    mine.buffer._prune("chat")
    assert mine.buffer.counts()["chat"]["train"] == 2, "what was held for it has gone"


def test_the_manifest_says_where_the_candidate_comes_from(bench: Make) -> None:
    mine = bench()
    manifest = mine.run(number=3).artifact.manifest
    assert (manifest.version, manifest.kind, manifest.form, manifest.parent) == ("v3", "eagle3", "lora", "base")
    assert (manifest.base, manifest.target) == (mine.base.hash, mine.base.target)
    assert manifest.origin["attempt"] == 3
    assert manifest.origin["tenants"] == ["default"], "whose requests it has learnt from"
    assert manifest.metrics["alpha_after"] > manifest.metrics["alpha_before"]


def shuffled(seed: int) -> Prepare:
    """Each position gets the distribution of another one of its request."""

    def shuffle(examples: Sequence[Example]) -> list[Example]:
        rng, found = random.Random(seed), []
        for example in examples:
            record, order = example.record, list(range(len(example.record.topk_positions)))
            rng.shuffle(order)
            mixed = {"topk_ids": record.topk_ids[order], "topk_logprobs": record.topk_logprobs[order]}
            found.append(replace(example, record=replace(record, **mixed)))
        return found

    return shuffle


@pytest.fixture(scope="module")
def champion(
    serving: TinyServing, base: Base, served: list[Served], tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """Against a random head even nonsense that is smooth can win, so the nonsense meets one that has learnt."""
    made = Bench(serving, base, served, tmp_path_factory.mktemp("champion"))
    artifact = made.run(number=9).artifact
    made.database.close()
    return artifact


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shuffled_labels_are_not_promoted(bench: Make, champion: Artifact, seed: int) -> None:
    mine = bench()
    mine.artifacts["v9"] = champion
    decision = mine.run(number=seed, parent="v9", prepare=shuffled(seed)).decision
    assert not decision.promote
    assert decision.gain.value < 0
    assert decision.requests >= 12
    assert decision.reason.startswith("kept")


def test_the_judges_are_later_than_the_data_and_were_never_learnt_from(bench: Make) -> None:
    mine = bench()
    judged: list[int] = []
    measured = mine.buffer.measured
    mine.buffer.measured = lambda order: judged.append(order) or measured(order)  # type: ignore[func-returns-value, method-assign]
    attempt = mine.run()
    probes = set(mine.buffer.probes()["chat"])
    assert len(set(judged) - probes) == attempt.decision.requests
    assert all(order > attempt.snapshot for order in set(judged) - probes)
    learnt = {row[0] for row in mine.database.rows("SELECT ord FROM ledger WHERE trained")}
    assert len(learnt) == attempt.requests
    assert not learnt & set(judged)
    assert set(attempt.decision.probes) == {"chat"}


def test_a_child_continues_its_parent(bench: Make) -> None:
    mine = bench()
    first = mine.run(number=1)
    mine.artifacts["v1"] = first.artifact
    second = mine.run(number=2, parent="v1", breathe=lambda doing, wait_ms: mine.breathe(doing, 10**6))
    assert second.parent == "v1"
    assert second.snapshot > first.snapshot
    # It begins where the parent ended, and so at a lower loss than the base.
    assert second.report.losses[0] < first.report.losses[0] - 0.2


def test_a_parent_of_another_rank_is_left_for_the_base(bench: Make) -> None:
    first = bench()
    artifact = first.run().artifact
    second = bench(learner__lora_rank=4, learner__lora_alpha=8)
    second.artifacts["v1"] = artifact
    attempt = second.run(number=2, parent="v1")
    assert attempt.artifact.tensors["fc.lora_A"].shape[0] == 4


def test_without_later_requests_nothing_is_decided(bench: Make) -> None:
    mine = bench(gate__wait_s=30)

    def nobody_comes(doing: str, wait_ms: int) -> None:
        mine.said.append(doing)
        mine.now += wait_ms / 1000

    attempt = mine.run(breathe=nobody_comes)
    assert attempt.undecided
    assert not attempt.decision.promote
    assert mine.now == 30
    assert any("0 of 12" in doing for doing in mine.said)


def test_a_stop_in_the_middle_keeps_what_was_learnt_from_until_the_attempt_has_ended(bench: Make) -> None:
    mine = bench()

    def stop(doing: str, wait_ms: int) -> None:
        raise InterruptedError(doing)

    with pytest.raises(InterruptedError, match="step 1 of"):
        mine.run(breathe=stop)
    assert mine.database.rows("SELECT * FROM pinned") != []
    mine.buffer.end_attempt()
    assert mine.database.rows("SELECT * FROM pinned") == []


def test_an_empty_buffer_is_no_attempt(serving: TinyServing, base: Base, tmp_path: Path) -> None:
    empty = Bench(serving, base, [], tmp_path)
    runner = AttemptRunner(empty.config, base, empty.buffer, empty.bank)
    asked = {"focus": ["chat"], "name": "v1", "parent": "base", "parent_artifact": None, "breathe": empty.breathe}
    assert runner.run(1, **asked) is None  # type: ignore[arg-type]
    empty.database.close()
