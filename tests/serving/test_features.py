"""Features on their way through Ray to a learner that comes, goes, and dawdles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from serving import features as module
from serving.features import LEARNER, NAMESPACE, RayFeatureSink

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROWS, WIDTH = 10, 4
ANSWERED = 3 * ROWS  # room for three tensors on their way


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFeatureSink]:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.1)
    sink = RayFeatureSink(ANSWERED)
    yield sink
    sink.stop()


@pytest.fixture
def start_learner() -> Iterator[Callable[..., Any]]:
    import ray

    @ray.remote(num_cpus=0)
    class Learner:
        def __init__(self, answer_s: float) -> None:
            self.answer_s = answer_s
            self.got: list[tuple[str, Any]] = []

        def features(self, id: str, array: Any) -> None:
            time.sleep(self.answer_s)
            self.got.append((id, array.copy()))

        def received(self) -> list[tuple[str, Any]]:
            return self.got

    started: list[Any] = []

    def start(answer_s: float = 0.0) -> Any:
        learner = Learner.options(name=LEARNER, namespace=NAMESPACE).remote(answer_s)
        started.append(learner)
        ray.get(learner.received.remote())
        return learner

    yield start
    for learner in started:
        ray.kill(learner)


def tensor(value: int) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), float(value), dtype=torch.float16)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def test_the_learner_gets_what_was_offered(sink: RayFeatureSink, start_learner: Callable[..., Any]) -> None:
    import ray

    learner = start_learner()
    assert sink.offer("a", tensor(1))
    assert sink.offer("b", tensor(2))
    wait_until(lambda: len(ray.get(learner.received.remote())) == 2)
    got = dict(ray.get(learner.received.remote()))
    assert got["b"].dtype.name == "float16"
    assert got["b"].tolist() == tensor(2).tolist()
    assert sink.dropped == 0
    wait_until(lambda: sink.in_flight == 0)  # room again for others


def test_without_a_learner_they_are_dropped_and_counted(sink: RayFeatureSink) -> None:
    for number in range(5):
        sink.offer(str(number), tensor(number))
    wait_until(lambda: sink.dropped == 5)
    assert sink.in_flight == 0


def test_a_learner_that_dawdles_bounds_what_is_on_its_way(
    sink: RayFeatureSink, start_learner: Callable[..., Any]
) -> None:
    start_learner(answer_s=1.0)
    started = time.monotonic()
    taken = [sink.offer(str(number), tensor(number)) for number in range(5)]
    assert time.monotonic() - started < 0.5  # it never waits
    assert taken == [True, True, True, False, False]
    assert sink.dropped == 2
    wait_until(lambda: sink.in_flight == 0)
    assert sink.offer("later", tensor(9))


def test_a_lost_learner_is_a_loss_until_there_is_another(
    sink: RayFeatureSink, start_learner: Callable[..., Any]
) -> None:
    import ray

    first = start_learner()
    assert sink.offer("a", tensor(1))
    wait_until(lambda: sink.in_flight == 0)
    ray.kill(first)
    wait_until(lambda: sink.offer("lost", tensor(2)) and _settled(sink) and sink.dropped > 0)
    second = start_learner()
    wait_until(lambda: sink.offer("b", tensor(3)) and _settled(sink) and bool(ray.get(second.received.remote())))
    assert ray.get(second.received.remote())[0][0] == "b"


def _settled(sink: RayFeatureSink) -> bool:
    wait_until(lambda: sink.in_flight == 0)
    return True
