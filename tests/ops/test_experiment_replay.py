"""The learner over recorded traffic: judged first, learnt from after, and served by what would have been there then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.base import Base, load_base
from learner.evaluator import Judged
from learner.example import Example
from ops.experiment_arms import ARMS
from ops.experiment_offline import judge_all, run_offline
from ops.experiment_replay import Replay, look_back
from ops.experiment_result import ArmResult, ArmShelf
from shared.config import Config
from tests.learner.traffic import TOKENS, TinyServing

RECORDS = 60
ATTEMPT_TOKENS = 1500
# An attempt takes as long as ten records do, so several fit into the traffic.
SERVED_PER_S, LEARNT_PER_S = 10 * TOKENS, ATTEMPT_TOKENS

Run = Callable[..., ArmResult]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(
        tmp_path_factory.mktemp("serving"),
        **{
            "learner.min_fresh_tokens": 40,  # without a drift an attempt takes eight times as many
            "learner.attempt_tokens": ATTEMPT_TOKENS,
            "gate.min_requests": 6,
        },
    )


@pytest.fixture(scope="module")
def base(serving: TinyServing) -> Base:
    found = load_base(serving.config)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def stream(serving: TinyServing) -> list[Example]:
    return [Example(served.record, torch.from_numpy(served.features)) for served in serving.serve(RECORDS)]


@pytest.fixture(scope="module")
def static(serving: TinyServing, base: Base, stream: list[Example]) -> list[Judged]:
    return judge_all(base.module, stream, serving.config, base)


@pytest.fixture(scope="module")
def replay_of(
    serving: TinyServing,
    base: Base,
    stream: list[Example],
    static: list[Judged],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Replay]:
    def make(arm: str = "online", config: Config = serving.config, **changes: Any) -> Replay:
        pace = {"served_per_s": SERVED_PER_S, "learnt_per_s": LEARNT_PER_S, "full_learning_rate": 5e-3, **changes}
        folder = tmp_path_factory.mktemp("replay")
        return Replay(ARMS[arm], config, base, stream, static, folder=folder, say=lambda done, doing: None, **pace)

    return make


@pytest.fixture(scope="module")
def online(replay_of: Callable[..., Replay]) -> tuple[Replay, ArmResult]:
    replay = replay_of()
    return replay, replay.run()


def alpha(judged: list[Judged]) -> float:
    return sum(j.first for j in judged) / sum(j.positions for j in judged)


def test_every_record_is_judged_once_in_order_by_the_version_that_would_have_served_it(
    online: tuple[Replay, ArmResult], serving: TinyServing, base: Base, stream: list[Example], static: list[Judged]
) -> None:
    replay, result = online
    assert [judged.id for judged in result.judged] == [example.record.id for example in stream]
    assert len(result.versions) >= 2, "something was promoted"
    ends = [version.record for version in result.versions[1:]] + [RECORDS]
    for version, end in zip(result.versions, ends, strict=True):
        mine = judge_all(replay.module(version.name), stream[version.record : end], serving.config, base)
        found = [judged.first for judged in result.judged[version.record : end]]
        assert found == pytest.approx([judged.first for judged in mine], abs=1e-3)
    # It learns something: a random head is easily beaten.
    last = result.versions[-1].record
    assert alpha(list(result.judged[last:])) > alpha(static[last:]) + 0.05


def test_traffic_goes_on_while_an_attempt_is_made(online: tuple[Replay, ArmResult]) -> None:
    _, result = online
    assert all(attempt.tokens >= 0.9 * ATTEMPT_TOKENS for attempt in result.attempts)
    # Ten records come while it trains, and what is judged takes time too.
    assert all(attempt.ended - attempt.begun >= 10 for attempt in result.attempts)
    served_from = [attempt.ended for attempt in result.attempts if attempt.promoted]
    assert [version.record for version in result.versions[1:]] == served_from
    assert result.tokens_learnt == sum(attempt.tokens for attempt in result.attempts)


def test_two_replays_are_the_same(replay_of: Callable[..., Replay], online: tuple[Replay, ArmResult]) -> None:
    again = replay_of().run()
    assert again.judged == online[1].judged
    assert again.versions == online[1].versions


def test_without_a_gate_every_candidate_serves_and_a_faster_learner_misses_fewer_records(
    replay_of: Callable[..., Replay], online: tuple[Replay, ArmResult]
) -> None:
    result = replay_of("online-no-gate", learnt_per_s=4 * LEARNT_PER_S).run()
    assert len(result.versions) == 1 + len(result.attempts)
    assert all(attempt.promoted and attempt.reason.startswith("no gate") for attempt in result.attempts)
    fast, slow = result.attempts[0], online[1].attempts[0]
    assert fast.begun == slow.begun
    assert fast.ended <= slow.ended - 5  # of the ten that come while a slow one trains


def test_all_weights_can_be_trained_instead(replay_of: Callable[..., Replay], static: list[Judged]) -> None:
    replay = replay_of("online-full")
    result = replay.run()
    last = result.versions[-1]
    assert last.record > 0
    assert alpha(list(result.judged[last.record :])) > alpha(static[last.record :])


def test_looking_back_asks_each_version_of_its_own_domains_and_the_last_of_all(
    online: tuple[Replay, ArmResult], serving: TinyServing, base: Base, stream: list[Example]
) -> None:
    replay, result = online
    apart = {"chat": stream[:3], "other": stream[3:5]}
    found = look_back(replay, result, serving.config, base, apart, lambda done, doing: None)
    last = result.versions[-1].name
    assert set(found.looked_back["chat"]) == {version.name for version in result.versions}
    assert set(found.looked_back["other"]) == {last}
    assert [len(rows) for rows in found.looked_back["chat"].values()] == [3] * len(result.versions)


def test_an_offline_drafter_learns_and_sees_its_data_as_often_as_asked(
    serving: TinyServing, base: Base, stream: list[Example], static: list[Judged]
) -> None:
    data, later = stream[:30], stream[30:]
    found = run_offline(ARMS["offline-100"], serving.config, base, later, data, 2.0, 0, lambda done, doing: None)
    wanted = sum(len(example.record.output_ids) - 1 for example in data)
    assert found.tokens_learnt == pytest.approx(2 * wanted, rel=0.1)  # whole batches
    assert alpha(list(found.judged)) > alpha(static[30:]) + 0.05


def test_a_finished_arm_comes_back_from_disk_as_it_was(online: tuple[Replay, ArmResult], tmp_path: Path) -> None:
    shelf, arm, result = ArmShelf(tmp_path / "arms"), ARMS["online"], online[1]
    assert shelf.get(arm, "k") is None
    shelf.put(arm, "k", result)
    assert shelf.get(arm, "k") == result
    assert shelf.get(arm, "other") is None, "what depends on another setting is another result"
    shelf.path(arm, "k").write_text("{torn", encoding="utf-8")
    assert shelf.get(arm, "k") is None
