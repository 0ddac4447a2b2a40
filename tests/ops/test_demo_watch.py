"""What has been seen stays seen, promotions are noticed once, and a part that is away is named and ends nothing."""

from __future__ import annotations

from ops.demo_watch import WINDOW_S, Watch
from tests.ops.demo_fakes import FakeSources, champion, measurement


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _watch() -> tuple[Watch, FakeSources, _Clock]:
    sources, clock = FakeSources(), _Clock()
    return Watch(sources, clock=clock), sources, clock


def test_measurements_and_counters_add_up() -> None:
    watch, sources, clock = _watch()
    sources.news = [measurement(0)]
    watch.look()
    sources.news = [measurement(1)]
    sources.epochs = {("r", "1"): {"steps|domain=sql": 3.0, "emitted|domain=sql": 6.0}}
    clock.now += WINDOW_S
    watch.look()
    assert [m.order for m in watch.board.measurements] == [0, 1]
    (window,) = watch.board.windows
    assert window.emitted == watch.board.counters.total("emitted") == 6


def test_a_promotion_is_noticed_once_with_the_reason_that_the_gate_gave() -> None:
    watch, sources, _ = _watch()
    sources.heartbeats = {
        "learner": {"number": 0, "decision": "kept: an older decision"},
        "replica:a": {"drafter_version": "v1"},
    }
    sources.pointer = champion(1)
    watch.look()
    assert [(p.version, p.reason) for p in watch.board.promotions] == [("v1", "")]  # the heartbeat is a second late
    sources.heartbeats["learner"] = {"number": 1, "decision": "promoted: it is better"}
    watch.look()
    sources.heartbeats["learner"] = {"number": 1, "decision": "kept: a later decision"}
    watch.look()
    assert [(p.version, p.reason) for p in watch.board.promotions] == [("v1", "promoted: it is better")]
    assert watch.board.version == "v1"


def test_what_was_champion_before_the_run_is_no_promotion() -> None:
    watch, sources, _ = _watch()
    sources.pointer = champion(4)
    watch.start()
    watch.stop()
    assert not watch.board.promotions


def test_a_part_that_is_away_is_named_and_its_last_news_stay() -> None:
    watch, sources, clock = _watch()
    sources.news = [measurement(0)]
    sources.heartbeats = {"learner": {"state": "training", "trouble": ["MLflow is away"]}}
    watch.look()
    sources.broken = {"redis", "learner"}
    clock.now += WINDOW_S
    watch.look()
    assert [text.partition(":")[0] for text in watch.board.trouble] == ["redis", "learner", "learner"]
    assert watch.board.learner["state"] == "training"
    assert len(watch.board.measurements) == 1
    sources.broken, sources.heartbeats = set(), {}
    watch.look()
    assert not watch.board.trouble


def test_readiness_is_remembered_with_its_time() -> None:
    watch, sources, clock = _watch()
    watch.look()
    sources.readiness = (503, "loading")
    clock.now += 40
    watch.look()
    assert clock.now - watch.ready_at == 40
    assert watch.ready_answer == "loading"
    assert "loading" in watch.board.trouble[0]
