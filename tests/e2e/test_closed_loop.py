"""Traffic teaches the drafter, outages and bad versions come and go, and no answer ever changes.

One stack for all. Each test brings it to where it begins (`promoted`) and so can run alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared.artifact import open_blob
from shared.counters import Counters
from shared.errors import ServiceDown
from shared.store import Champion
from tests.e2e.live import Answer, LiveStack, Traffic, until
from tests.learner.traffic import TinyServing, random_adapter

# The tiny head's alpha is about 0.21 untrained, 0.33 after its first promotion and 0.1 when noise is added to it. Of
# this many tested positions the standard error is below 0.02: 0.04 apart is no chance.
TESTED, APART = 800, 0.04


def alpha(counters: Counters, version: str) -> float:
    accepted, tested = counters.alpha_counts(version=version)
    return accepted / tested if tested >= TESTED else 0.0


def promoted(stack: LiveStack) -> Champion:
    """The champion that the learner made by itself, once it serves."""
    champion = stack.store.champion()
    if champion is None:
        with Traffic(stack):
            champion = until(stack.store.champion, "promoted")
    until(lambda: stack.ready()["drafter_version"] != "base", "swapped")
    return champion


@contextmanager
def no_attempts(stack: LiveStack) -> Iterator[None]:
    """The champion stays what it is, unless we change it."""
    stack.store.orders.ask("pause")
    with Traffic(stack):  # which an attempt in progress may need to be judged on; it may still promote
        until(lambda: stack.learner_state()["state"] == "paused", "paused")
    try:
        yield
    finally:
        stack.store.orders.ask("resume")


def consumed(stack: LiveStack) -> float:
    """Traces that this life of the learner has taken."""
    stored: float = stack.learner().get("counters", {}).get("traces_stored", 0)
    return stored


def serving_metric(stack: LiveStack, key: str) -> list[Any]:
    """Points of the one serving run, oldest first."""
    [run] = stack.mlflow.search_runs(_experiments(stack), "tags.`redraft.kind` = 'serving'")
    return sorted(stack.mlflow.get_metric_history(run.info.run_id, key), key=lambda point: point.timestamp)


def attempts(stack: LiveStack, decision: str) -> list[Any]:
    wanted = f"tags.`redraft.kind` = 'attempt' and tags.`redraft.decision` = '{decision}'"
    return list(stack.mlflow.search_runs(_experiments(stack), wanted))


def _experiments(stack: LiveStack) -> list[str]:
    experiment = stack.mlflow.get_experiment_by_name("redraft")
    assert experiment is not None
    return [experiment.experiment_id]


def aliases(stack: LiveStack) -> dict[str, str]:
    """alias -> our name of the version."""
    held = stack.mlflow.get_registered_model("drafter").aliases
    return {
        alias: stack.mlflow.get_model_version("drafter", number).tags["redraft.version"]
        for alias, number in held.items()
    }


def test_traffic_teaches_the_drafter_and_changes_no_answer(stack: LiveStack) -> None:
    plain = stack.fixed_answers(speculative=False)
    before = stack.fixed_answers()
    assert stack.ready()["drafter_version"] == stack.drafter_of_an_answer() == "base"
    with Traffic(stack) as traffic:
        champion = until(stack.store.champion, "promoted")
        during = stack.fixed_answers()
        until(lambda: alpha(stack.counters(), champion.version), f"tested {champion.version} {TESTED} times")
    assert traffic.failures == []
    with no_attempts(stack):
        newest = stack.store.champion()
        assert newest is not None
        until(lambda: stack.ready()["drafter_version"] == newest.version, "swapped")
        assert stack.drafter_of_an_answer() == newest.version
        after = stack.fixed_answers()
        assert before == during == after == plain
        assert {(answer.tokens, answer.finish_reason) for answer in after} == {(40, "length")}

        counters = stack.counters()
        assert alpha(counters, champion.version) > alpha(counters, "base") + APART
        assert counters.total("swaps") >= 1

        until(lambda: aliases(stack).get("champion") == newest.version, "registered")
        made = until(lambda: attempts(stack, "promoted"), "told")
        first = min(made, key=lambda run: run.info.start_time)
        assert first.data.tags["redraft.candidate"] == champion.version
        assert first.data.tags["redraft.reason"].startswith("promoted: alpha ")
        assert first.data.metrics["gate/gain_low"] > 0
        assert first.data.metrics["gate/alpha_after"] > first.data.metrics["gate/alpha_before"] + APART
        assert first.data.params["parent"] == "base"
        points = serving_metric(stack, "alpha")
        assert points[0].timestamp < first.info.end_time < points[-1].timestamp


def window_alpha(stack: LiveStack, after: float) -> float:
    """Of the windows in MLflow that began at or after this time (seconds), from their counts; 0 while there are few."""
    counts = {
        key: sum(point.value for point in serving_metric(stack, key) if point.timestamp >= 1000 * after)
        for key in ("accepted", "tested")
    }
    return counts["accepted"] / counts["tested"] if counts["tested"] >= TESTED else 0.0


def status_alpha(before: dict[str, Any], after: dict[str, Any], version: str) -> float:
    """What `redraft status --json` counted in between."""
    sums = dict.fromkeys(("accepted", "tested"), 0.0)
    for report, sign in ((before, -1), (after, 1)):
        for row in report["domains"]:
            if row["version"] == version:
                for name in sums:
                    sums[name] += sign * row[name]
    assert sums["tested"] >= TESTED
    return sums["accepted"] / sums["tested"]


def serve_until_known(stack: LiveStack, champion: Champion) -> tuple[float, float, float]:
    """Alpha from now on in three views, while this champion serves: counters, `redraft status`, MLflow."""
    with Traffic(stack) as traffic:
        until(lambda: stack.ready()["drafter_version"] == champion.version, "swapped")
        before, counted, started = stack.status(), stack.counters(), time.time() + 1  # the replica counts every second
        found = until(lambda: alpha(stack.counters().minus(counted), champion.version), f"tested {champion.version}")
        recorded = until(lambda: window_alpha(stack, started), "recorded")
        after = stack.status()
    assert traffic.failures == []
    assert after["champion"]["version"] == champion.version
    return found, status_alpha(before, after, champion.version), recorded


@pytest.mark.slow
def test_a_forced_bad_promotion_shows_in_every_view_and_a_rollback_ends_it(
    stack: LiveStack, serving: TinyServing
) -> None:
    promoted(stack)
    with no_attempts(stack):
        good = stack.store.champion()
        assert good is not None
        answers = stack.fixed_answers()
        usual = serve_until_known(stack, good)
        bad = stack.force(random_adapter(serving), "a drill")
        stack.store.orders.ask("pin", reason="or it would be rolled back before everybody has seen it")
        assert (bad.previous, bad.number) == (good.version, good.number + 1)
        fallen = serve_until_known(stack, bad)
        assert stack.fixed_answers() == answers
        until(lambda: aliases(stack) == {"champion": bad.version, "previous": good.version}, "told")
        stack.store.orders.ask("unpin", reason="the drill is over")
        back = Champion(**stack.store.orders.ask("rollback", reason="the drill is over"))
        assert (back.version, back.previous, back.blob) == (good.version, bad.version, good.blob)
        again = serve_until_known(stack, back)
        assert stack.fixed_answers() == answers
        until(lambda: aliases(stack) == {"champion": good.version, "previous": bad.version}, "told")
    for before, low, later in zip(usual, fallen, again, strict=True):
        assert low < before - APART, (usual, fallen, again)
        assert later > low + APART, (usual, fallen, again)


@contextmanager
def answers_stay(stack: LiveStack) -> Iterator[list[list[Answer]]]:
    """While traffic flows and something is done to the stack; whoever wants more comparisons appends answers."""
    before = stack.fixed_answers()
    asked: list[list[Answer]] = []
    with Traffic(stack) as traffic:
        until(lambda: traffic.answered > 20, "flowing")
        yield asked
        asked.append(stack.fixed_answers())
    assert traffic.failures == []
    assert asked == [before] * len(asked)


@pytest.mark.slow
def test_redis_may_die_and_come_back_empty(stack: LiveStack) -> None:
    promoted(stack)
    with answers_stay(stack) as asked:
        champion = stack.store.champion()
        assert champion is not None
        taken, pid = consumed(stack), stack.pid_of("redis")
        os.kill(pid, signal.SIGKILL)
        asked.append(stack.fixed_answers())
        until(lambda: stack.pid_of("redis") != pid, "started again")
        republished = until(lambda: _champion(stack), "republished")
        assert republished.number >= champion.number
        blob = stack.store.get_blob(republished.blob)
        assert blob is not None
        open_blob(blob, republished.blob)
        until(lambda: consumed(stack) > taken + 50, "consuming")
        until(lambda: stack.counters().total("emitted"), "counting")
        depth = stack.store.stream_depth()
        assert (depth.dead, depth.trimmed_unread) == (0, 0)


def _champion(stack: LiveStack) -> Champion | None:
    try:
        return stack.store.champion()
    except ServiceDown:
        return None


@pytest.mark.slow
def test_redis_may_hang(stack: LiveStack) -> None:
    promoted(stack)
    with answers_stay(stack) as asked:
        taken, pid = consumed(stack), stack.pid_of("redis")
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ServiceDown):
                stack.store.ping()
            asked.append(stack.fixed_answers())
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: consumed(stack) > taken + 50, "consuming")
        assert stack.pid_of("redis") == pid


@pytest.mark.slow
def test_the_learner_may_die(stack: LiveStack) -> None:
    promoted(stack)
    with answers_stay(stack) as asked:
        champion, before = stack.store.champion(), stack.learner()
        assert champion is not None
        pid = until(stack.learner_pid, "found")
        os.kill(pid, signal.SIGKILL)
        asked.append(stack.fixed_answers())
        until(lambda: stack.learner_pid() not in (0, pid), "started again")
        asked.append(stack.fixed_answers())
        # It goes on with the memory of its earlier life, and with the work.
        state = until(lambda: _alive_again(stack, pid), "loaded")
        assert state["attempts"] >= before["attempts"]
        assert state["number"] >= champion.number
        until(lambda: consumed(stack) > 50, "consuming")
        until(lambda: stack.learner()["attempts"] > before["attempts"], "learning")
        resumed = time.time()
        until(lambda: serving_metric(stack, "alpha")[-1].timestamp > 1000 * resumed, "recorded in the same run")


def _alive_again(stack: LiveStack, pid: int) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = stack.learner_state()
    except RuntimeError:  # Ray has not started it again yet
        return None
    return state if "champion" in state and stack.learner_pid() != pid else None


@pytest.mark.slow
def test_mlflow_may_die(stack: LiveStack) -> None:
    promoted(stack)
    with no_attempts(stack):
        champion = stack.store.champion()
        assert champion is not None
        blob = stack.store.get_blob(champion.blob)
        assert blob is not None
        with answers_stay(stack) as asked:
            pid, died = stack.pid_of("mlflow"), time.time()
            os.kill(pid, signal.SIGKILL)
            again = stack.force(blob, "while MLflow is away")
            asked.append(stack.fixed_answers())
            until(lambda: stack.pid_of("mlflow") != pid, "started again")
            until(lambda: _answers(stack), "answering")
            back = time.time()
            until(lambda: aliases(stack) == {"champion": again.version, "previous": champion.version}, "told of it")
            times = until(lambda: _times_between(stack, died, back), "told of the windows that it has missed")
            assert len(times) == len(set(times)), "each window once"
            until(lambda: stack.learner_state()["mlflow"]["trouble"] == "", "at peace with it")
            assert stack.learner_state()["mlflow"]["given_up"] == 0


def _answers(stack: LiveStack) -> bool:
    try:
        return bool(stack.mlflow.search_experiments(max_results=1))
    except Exception:  # whatever its transport says of a server that is not there
        return False


def _times_between(stack: LiveStack, died: float, back: float) -> list[int]:
    """Time stamps of the windows of an outage."""
    found = [point.timestamp for point in serving_metric(stack, "tokens")]
    return [stamp for stamp in found if 1000 * died <= stamp <= 1000 * back]
