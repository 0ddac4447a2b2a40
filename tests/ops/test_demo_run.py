"""A run ends in time, waits for the learner and no longer, and whatever ends it, what was seen is there."""

from __future__ import annotations

import time

import pytest

from ops import demo_run
from ops.demo_chat import Asking
from ops.demo_plan import Feed, Phase, Plan, Prompt
from ops.demo_run import DemoRun, Session
from ops.demo_scene import Scene
from ops.demo_traffic import Traffic
from ops.demo_watch import Watch
from shared.errors import ServiceDown
from tests.ops.demo_fakes import FakeApi, FakeSources, measurement

ASKING = Asking("m", 8, 0.0)


class _Stack:
    def __init__(self) -> None:
        self.restarted = ["redis"]

    def tend(self) -> list[str]:
        found, self.restarted = self.restarted, []
        return found


class _Display:
    """Keeps what it is shown; `interrupt_at` scenes it is Ctrl-C."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.scenes: list[Scene] = []
        self.notes: list[str] = []
        self._interrupt_at = interrupt_at

    def show(self, scene: Scene) -> None:
        self.scenes.append(scene)
        if len(self.scenes) == self._interrupt_at:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "_TICK_S", 0.02)
    monkeypatch.setattr("ops.demo_watch.LOOK_S", 0.02)


def _run(sources: FakeSources, *, prompts: int = 4, seconds: float = 30, drain_s: float = 5) -> DemoRun:
    texts = tuple(Prompt("sql", ({"role": "user", "content": f"{n}"},)) for n in range(prompts))
    plan = Plan((Phase("sql", 1.0, texts),), ("sql",))
    session = Session(
        api="http://fake",
        urls={},
        asking=ASKING,
        users=2,
        seconds=seconds,
        deadline=time.monotonic() + seconds + drain_s,
        learning=True,
        measuring=True,
        seed=0,
        about={},
    )
    traffic = Traffic(session.api, Feed(plan, seconds), ASKING, session.users, FakeApi().transport)
    return DemoRun(session, plan, _Stack(), Watch(sources), traffic)


def test_it_ends_when_everything_sent_is_measured() -> None:
    sources, display = FakeSources(), _Display()
    run = _run(sources)
    sources.news = [measurement(n, finished_at=time.time()) for n in range(4)]
    started = time.monotonic()
    run(display)
    assert time.monotonic() - started < 5  # neither the 30 s of traffic nor the drain were used up
    assert len(run.result.answers) == len(run.result.board.measurements) == 4
    assert display.notes == ["redis had ended and was started again"]
    assert set(run.result.first_sent) == {"sql"}


def test_it_waits_for_the_learner_no_longer_than_the_deadline() -> None:
    run, display = _run(FakeSources(), prompts=1, seconds=0.3, drain_s=0.5), _Display()
    started = time.monotonic()
    run(display)
    assert 0.5 < time.monotonic() - started < 5
    assert display.scenes[-1].phase == "the learner measures the last 1"


def test_dropped_traces_are_not_waited_for() -> None:
    sources = FakeSources()
    run = _run(sources, drain_s=600)
    sources.epochs = {}
    sources.news = [measurement(n) for n in range(3)]

    class Dropping(_Display):
        def show(self, scene: Scene) -> None:
            super().show(scene)
            sources.epochs = {("r", "1"): {"traces_dropped": 1.0}}

    started = time.monotonic()
    run(Dropping())
    assert time.monotonic() - started < 5


def test_ctrl_c_leaves_a_result() -> None:
    sources = FakeSources()
    sources.news = [measurement(0)]
    run = _run(sources, prompts=10_000)
    with pytest.raises(KeyboardInterrupt):
        run(_Display(interrupt_at=10))
    assert run.result.answers
    assert len(run.result.board.measurements) == 1
    assert run.result.ended_at > run.result.started_at


def test_a_stack_that_is_gone_ends_the_run_with_one_readable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "LOST_S", 0.2)
    sources = FakeSources()
    sources.readiness = (0, "connection refused")
    run = _run(sources, prompts=100_000)
    with pytest.raises(ServiceDown, match="not been ready for"):
        run(_Display())
    assert run.result.answers
