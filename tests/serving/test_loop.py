"""The engine's thread: one ending for everybody, whatever happens (law 9), and swaps between rounds (law 7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.engine.engine import Engine, Limits
from serving.engine.events import Delta, Ending, Event
from serving.engine.loop import EngineLoop
from serving.engine.request import GenerationParams, GenerationRequest
from serving.spec.gamma import GammaController
from shared.errors import NotReady, Overloaded, RequestError
from shared.trace import Sampling
from tests.tiny_engine import Bench

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), vocab=48)


@pytest.fixture
def loop(bench: Bench) -> Iterator[EngineLoop]:
    target = bench.target(blocks=64)
    box: list[EngineLoop] = []
    engine = Engine(
        target,
        bench.drafter("model", target),
        GammaController(fixed=2, most=4, exploration=0.0),
        Limits(max_context=256, max_batch=4, prefill_tokens=64),
        lambda sequence, event: box[0].listen(sequence, event),
    )
    box.append(EngineLoop(engine, max_queue=8))
    box[0].start()
    yield box[0]
    box[0].stop()
    engine.allocator.check([])


def request(name: str, tokens: int = 20, prompt: tuple[int, ...] = (5, 6, 7)) -> GenerationRequest:
    params = GenerationParams(sampling=GREEDY, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, prompt, params)


async def collect(loop: EngineLoop, asked: GenerationRequest) -> list[Event]:
    return [event async for event in loop.generate(asked)]


def all_blocks_come_back(loop: EngineLoop) -> bool:
    """A snapshot is of the last round, which may end a moment after the last event."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        snapshot = loop.snapshot()
        if snapshot.blocks_free == snapshot.blocks_total:
            return True
        time.sleep(0.01)
    return False


def test_many_callers_each_get_their_tokens_and_one_ending_last(loop: EngineLoop) -> None:
    async def everybody() -> list[list[Event]]:
        return await asyncio.gather(*(collect(loop, request(f"r{i}", 10 + i)) for i in range(8)))

    for index, events in enumerate(asyncio.run(everybody())):
        assert [isinstance(event, Ending) for event in events] == [False] * (len(events) - 1) + [True]
        ending = events[-1]
        assert isinstance(ending, Ending)
        tokens = sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        assert (ending.reason, ending.completion_tokens, tokens) == ("length", 10 + index, 10 + index)
    assert all_blocks_come_back(loop)


def test_the_wait_for_each_token_is_counted_once(loop: EngineLoop) -> None:
    events = asyncio.run(collect(loop, request("timed", 20)))
    counters = loop.latency.counters.fields

    def counted(name: str) -> float:
        return sum(value for field, value in counters.items() if field.startswith(f"{name}_le."))

    steps = [len(event.token_ids) for event in events if isinstance(event, Delta) and event.token_ids]
    assert len(steps) < 20, "some tokens came together"
    assert (counted("first_token"), counted("token")) == (1, sum(steps[1:]))
    assert counters["first_token_s"] > 0
    assert counters["token_s"] > 0
    waited = sum(counters.values()) - counted("first_token") - counted("token")
    assert waited < 60, "the sum over all tokens is the time that decoding took, not a multiple of it"


def test_a_caller_who_leaves_frees_the_blocks_and_nobody_else_notices(loop: EngineLoop) -> None:
    async def leave_one() -> list[Event]:
        other = asyncio.create_task(collect(loop, request("stays", 60)))
        leaving = loop.generate(request("leaves", 200))
        await anext(leaving)
        await leaving.aclose()
        return await other

    assert asyncio.run(leave_one())[-1].completion_tokens == 60  # type: ignore[union-attr]
    assert all_blocks_come_back(loop)
    assert loop.snapshot().counters["requests_cancelled"] == 1


def test_what_can_never_fit_is_refused_with_both_numbers(loop: EngineLoop) -> None:
    with pytest.raises(RequestError, match=r"256 tokens of context.*303 were asked for: 3 in the prompt and 300"):
        loop.check(request("long", 300))
    with pytest.raises(RequestError, match="prompt is empty"):
        loop.check(request("empty", prompt=()))
    with pytest.raises(RequestError, match="Token id 48 is not in the vocabulary"):
        loop.check(request("alien", prompt=(48,)))


def test_a_full_queue_is_refused_at_the_door(loop: EngineLoop) -> None:
    async def flood() -> int:
        waiting = [asyncio.create_task(collect(loop, request(f"r{i}", 120))) for i in range(40)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
        return sum(isinstance(result, Overloaded) for result in done)

    refused = asyncio.run(flood())
    assert 0 < refused < 40


def test_a_broken_round_ends_its_requests_as_failed_and_the_next_are_served(loop: EngineLoop) -> None:
    def explode(_engine: Engine) -> None:
        raise ValueError("a defect")

    async def run() -> tuple[Event, Event]:
        stream = loop.generate(request("victim", 200))
        await anext(stream)
        loop.between_rounds(explode)
        events = [event async for event in stream]
        after = await collect(loop, request("after"))
        return events[-1], after[-1]

    failed, after = asyncio.run(run())
    assert isinstance(failed, Ending)
    assert failed.reason == "failed"
    assert "ValueError" in failed.message
    assert isinstance(after, Ending)
    assert after.reason == "length"


def test_stopping_ends_what_runs_as_cancelled_and_refuses_the_rest(loop: EngineLoop) -> None:
    async def run() -> Event:
        stream = loop.generate(request("running", 200))
        await anext(stream)
        await asyncio.to_thread(loop.stop)
        return [event async for event in stream][-1]

    ending = asyncio.run(run())
    assert isinstance(ending, Ending)
    assert ending.reason == "cancelled"
    assert not loop.alive
    with pytest.raises(NotReady):
        loop.check(request("late"))


def test_draining_answers_what_runs_and_refuses_what_comes(loop: EngineLoop) -> None:
    async def run() -> tuple[bool, Event]:
        task = asyncio.create_task(collect(loop, request("running", 100)))
        await asyncio.sleep(0.05)
        drained = await asyncio.to_thread(loop.drain, 30.0)
        with pytest.raises(NotReady):
            loop.check(request("late"))
        return drained, (await task)[-1]

    drained, ending = asyncio.run(run())
    assert drained
    assert isinstance(ending, Ending)
    assert ending.reason == "length"


def test_snapshot_names_the_drafter_and_its_estimate(loop: EngineLoop, tmp_path: Path) -> None:
    asyncio.run(collect(loop, request("one", 40)))
    snapshot = loop.snapshot()
    assert snapshot.drafter_version == "base"
    assert 0.0 < snapshot.alpha_by_domain["default"] <= 1.0
