"""Nobody waits for MLflow: entries queue in order, within bounds, and what is lost is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

import learner.journal as module
from learner.journal import TRIES, Journal
from learner.registry import AttemptEntry, Point, Refused
from shared.errors import ServiceDown
from shared.store import Champion


class FakeRegistry:
    """Delivers into lists; `error` is raised instead."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.done: list[str] = []
        self.calls = 0
        self.error: Callable[[str], Exception | None] = lambda what: None
        self.champion: tuple[Champion, bytes] | None = None
        self.closed = False

    def _call(self, what: str) -> None:
        self.calls += 1
        if error := self.error(what):
            raise error

    def log_points(self, points: Sequence[Point]) -> None:
        self._call("points")
        self.points.extend(points)

    def log_attempt(self, entry: AttemptEntry) -> None:
        self._call(entry.name)
        self.done.append(entry.name)

    def set_aliases(self, champion: str, previous: str) -> None:
        self._call(champion)
        self.done.append(champion)

    def find_champion(self, base: str) -> tuple[Champion, bytes] | None:
        self._call(base)
        return self.champion

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def journal(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setattr(module, "_BACKOFF_S", (0.02, 0.02))
    found = Journal(registry)  # type: ignore[arg-type]
    found.start()
    yield found
    found.stop()


def attempt(name: str) -> AttemptEntry:
    return AttemptEntry(name, 0.0, 1.0, {}, {}, {})


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def down(_what: str) -> Exception:
    return ServiceDown("away on purpose")


def test_entries_arrive_in_order_and_keep_their_times(journal: Journal, registry: FakeRegistry) -> None:
    registry.error = down
    journal.window({"alpha": 0.5}, step=1, at=10.0)
    journal.window({"alpha": 0.6, "tested": 7}, step=2, at=15.0)
    journal.attempt(attempt("attempt 1"))
    journal.aliases("v1", "base")
    until(lambda: "on purpose" in journal.status()["trouble"])
    assert journal.status()["waiting"] == 5
    registry.error = lambda what: None
    until(lambda: journal.status()["waiting"] == 0)
    expected = [Point("alpha", 0.5, 10.0, 1), Point("alpha", 0.6, 15.0, 2), Point("tested", 7.0, 15.0, 2)]
    assert registry.points == expected
    assert registry.done == ["attempt 1", "v1"]
    assert journal.status() == {"waiting": 0, "given_up": 0, "trouble": ""}


def test_queues_are_bounded_and_the_oldest_go(
    journal: Journal, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POINTS_KEPT", 3)
    monkeypatch.setattr(module, "ENTRIES_KEPT", 2)
    registry.error = down
    for step in range(5):
        journal.window({"alpha": float(step)}, step=step, at=float(step))
        journal.attempt(attempt(f"attempt {step}"))
    assert journal.status()["given_up"] == 5
    registry.error = lambda what: None
    until(lambda: journal.status()["waiting"] == 0)
    assert [point.step for point in registry.points] == [2, 3, 4]
    assert registry.done == ["attempt 3", "attempt 4"]


def test_what_is_refused_is_given_up_and_the_rest_goes_on(journal: Journal, registry: FakeRegistry) -> None:
    registry.error = lambda what: Refused("a wrong name") if what in ("bad", "points") else None
    journal.window({"alpha": 0.5}, step=1, at=10.0)
    for name in ("bad", "good"):
        journal.attempt(attempt(name))
    until(lambda: registry.done == ["good"])
    until(lambda: journal.status()["waiting"] == 0)
    assert journal.status()["given_up"] == 2
    assert registry.calls == 2 * TRIES + 1
    assert journal.status()["trouble"] == ""


def test_the_champion_is_asked_for_until_mlflow_answers(journal: Journal, registry: FakeRegistry) -> None:
    found = (Champion("v1", "h", "b", "t", "eagle3", 4, "base", 0.0), b"blob")
    registry.error, registry.champion = down, found
    assert journal.champion("b") is None
    until(lambda: journal.status()["trouble"] != "")
    assert journal.champion("b") is None
    registry.error = lambda what: None
    answers: list[object] = []
    until(lambda: answers.append(journal.champion("b")) or answers[-1] is not None)  # type: ignore[func-returns-value]
    assert answers[-1] == found
    assert journal.champion("b") is None, "the answer is given once"


def test_without_mlflow_nothing_is_kept_and_it_is_said() -> None:
    journal = Journal(None)
    journal.start()
    journal.window({"alpha": 0.5}, step=1, at=10.0)
    journal.attempt(attempt("attempt 1"))
    assert journal.champion("b") is None
    status = journal.status()
    assert (status["waiting"], status["given_up"]) == (0, 0)
    assert "tracking_uri" in status["trouble"]
    journal.stop()


def test_stopping_delivers_what_waits_and_closes_the_run(registry: FakeRegistry) -> None:
    journal = Journal(registry)  # type: ignore[arg-type]
    journal.start()
    journal.attempt(attempt("the last one"))
    journal.stop()
    assert registry.done == ["the last one"]
    assert registry.closed
