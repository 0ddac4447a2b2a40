"""Laws 6 and 9 under any schedule: one ending for each request, no block lost, and answers that no schedule changes.

Requests come, leave, are put back for want of blocks, and fail, in an order that hypothesis makes up. The target's
cache holds the tokens themselves, so an answer is right only if every block table was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.engine.engine import Engine, Limits
from serving.engine.events import Delta, Ending, Event
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence
from shared.trace import Sampling
from tests.fakes_drafters import BrokenDrafter, PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer, seeded_answer
from tests.tiny_engine import fixed_gamma, request

GREEDY, SEEDED = Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, seeded=True)


class Audience:
    """Hears every event, and knows what is owed to each request."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)

    def __call__(self, sequence: Sequence, event: Event) -> None:
        self.events[sequence.id].append(event)

    def endings(self, id: str) -> list[Ending]:
        return [event for event in self.events[id] if isinstance(event, Ending)]

    def tokens(self, id: str) -> list[int]:
        return [token for event in self.events[id] if isinstance(event, Delta) for token in event.token_ids]


class Room:
    """A small engine and its audience."""

    def __init__(self, *, blocks: int = 12, gamma: int = 3, batch: int = 4, prefill: int = 7) -> None:
        self.audience = Audience()
        self.drafter = PlaybackDrafter({}, wrong=lambda position: position % 3 == 2)
        self.engine = Engine(
            TokenTarget(blocks=blocks),  # type: ignore[arg-type]
            self.drafter,
            fixed_gamma(gamma),
            Limits(max_context=48, max_batch=batch, prefill_tokens=prefill),
            self.audience,
        )
        self.sequences: dict[str, Sequence] = {}
        self.asked: dict[str, GenerationRequest] = {}

    def add(self, prompt: list[int], cap: int, sampling: Sampling, seed: int | None) -> str:
        id = f"r{len(self.asked)}"
        asked = request(id, prompt, sampling, seed=seed, max_tokens=cap, ignore_eos=False)
        self.engine.check(asked)
        self.drafter.answers = {**self.drafter.answers, id: greedy_answer(prompt, cap)}
        self.asked[id], self.sequences[id] = asked, self.engine.add(asked)
        return id

    def check_blocks(self) -> None:
        self.engine.allocator.check([sequence.table for sequence in self.engine.scheduler])
        for sequence in self.engine.scheduler.waiting:
            assert not sequence.table, "who waits owns nothing"

    def run(self) -> None:
        for _ in range(3000):
            if self.engine.idle:
                return
            self.engine.step()
            self.check_blocks()
        raise AssertionError("the engine does not come to an end")

    def right_answer(self, id: str) -> list[int] | None:
        params = self.asked[id].params
        if params.sampling.greedy:
            return greedy_answer(self.asked[id].prompt_ids, params.max_tokens, ignore_eos=False)
        if params.seed is not None:
            return seeded_answer(self.asked[id].prompt_ids, params.max_tokens, params.sampling, params.seed)
        return None

    def check_endings(self) -> None:
        """One ending each, last; the tokens add up, and are right whoever else was there."""
        assert self.engine.allocator.free == self.engine.allocator.num_blocks
        for id in self.asked:
            (ending,) = self.audience.endings(id)
            assert self.audience.events[id][-1] is ending
            tokens, right = self.audience.tokens(id), self.right_answer(id)
            assert len(tokens) == ending.completion_tokens
            if right is not None:
                assert tokens == (right if ending.reason in ("stop", "length") else right[: len(tokens)])


class AnySchedule(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.room = Room()

    @rule(
        prompt=st.lists(st.integers(3, 15), min_size=1, max_size=20),
        cap=st.integers(1, 26),
        sampling=st.sampled_from([(GREEDY, None), (SEEDED, 5), (Sampling(), None)]),
    )
    def add(self, prompt: list[int], cap: int, sampling: tuple[Sampling, int | None]) -> None:
        self.room.add(prompt, cap, *sampling)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.room.engine.step()
            self.room.check_blocks()

    @precondition(lambda self: self.room.asked)
    @rule(pick=st.integers(0, 10**6))
    def leave(self, pick: int) -> None:
        """Whatever state the request is in, ended included."""
        self.room.sequences[f"r{pick % len(self.room.asked)}"].cancelled = True

    @rule()
    def swap(self) -> None:
        self.room.drafter.version += "'"

    @precondition(lambda self: len(self.room.asked) > 3)
    @rule()
    def fail(self) -> None:
        self.room.engine.fail_all("on purpose")

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.room.check_blocks()

    def teardown(self) -> None:
        self.room.run()
        self.room.check_endings()


AnySchedule.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnySchedule = AnySchedule.TestCase


def test_want_of_blocks_puts_requests_back_and_changes_no_answer() -> None:
    """Ten requests of up to 34 positions share 48: the youngest go back again and again."""
    room = Room(batch=6)
    for i in range(10):
        seeded = i % 2
        room.add(
            [3 + (i * 7 + j) % 13 for j in range(4 + i)], 20, SEEDED if seeded else GREEDY, 70 + i if seeded else None
        )
    room.run()
    room.check_endings()
    assert room.engine.scheduler.preemptions >= 3
    counters = room.engine.counters
    # A token that was computed twice was still emitted and counted once.
    assert counters.total("emitted") == sum(len(room.audience.tokens(id)) for id in room.asked)
    assert counters.total("requests_finished") == len(room.asked)


# --- every way to end, one by one ------------------------------------------------------------------------------


def waiting(room: Room) -> str:
    for _ in range(4):
        room.add([5, 6, 7], 20, GREEDY, None)
    return room.add([5, 6, 7], 20, GREEDY, None)  # the fifth: the batch takes four


def prefilling(room: Room) -> str:
    id = room.add([5] * 20, 20, GREEDY, None)
    room.engine.step()
    assert 0 < room.sequences[id].kv_len < 20
    return id


def decoding(room: Room) -> str:
    id = room.add([5, 6, 8], 20, GREEDY, None)
    room.engine.step()
    room.engine.step()
    assert 0 < room.sequences[id].committed < 20
    return id


def put_back(room: Room) -> str:
    prompts = ([first, second] * 5 for first in range(3, 16) for second in range(3, 16))
    for prompt in islice((p for p in prompts if len(greedy_answer(p, 26, ignore_eos=False)) > 20), 3):
        room.add(prompt, 26, GREEDY, None)
    for _ in range(200):
        room.engine.step()
        for sequence in room.engine.scheduler.waiting:
            if sequence.committed:
                return sequence.id
    raise AssertionError("nobody was put back")


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.run()
    room.check_endings()


STATES = [waiting, prefilling, decoding, put_back]


@pytest.mark.parametrize("state", STATES)
def test_a_cancelled_request_ends_within_a_step(room: Room, state: object) -> None:
    id = state(room)  # type: ignore[operator]
    room.sequences[id].cancelled = True
    room.engine.step()
    assert [ending.reason for ending in room.audience.endings(id)] == ["cancelled"]
    assert room.sequences[id].table == []
    assert room.engine.counters.total("requests_cancelled") == 1


@pytest.mark.parametrize("state", STATES)
def test_a_failure_ends_everybody_and_frees_everything(room: Room, state: object) -> None:
    state(room)  # type: ignore[operator]
    alive = [id for id in room.asked if not room.audience.endings(id)]
    room.engine.fail_all("on purpose")
    for id in alive:
        (ending,) = room.audience.endings(id)
        assert (ending.reason, ending.code, ending.message) == ("failed", "internal_error", "on purpose")
    assert room.engine.idle
    assert room.engine.allocator.free == room.engine.allocator.num_blocks
    assert room.engine.counters.total("requests_failed") == len(alive)
    room.add([3, 4], 5, GREEDY, None)  # and the next is served: the fixture runs it to its end


def test_a_drafter_that_breaks_mid_round_leaves_an_engine_that_serves(room: Room) -> None:
    id = decoding(room)
    whole, room.engine.drafter = room.engine.drafter, BrokenDrafter(fail_at=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        room.engine.step()
    room.engine.fail_all("the drafter broke")
    room.engine.drafter = whole
    assert room.audience.endings(id)[0].reason == "failed"
    room.add([3, 4], 5, GREEDY, None)


def test_a_request_that_ended_cannot_be_cancelled_into_a_second_ending(room: Room) -> None:
    id = room.add([5, 6], 3, GREEDY, None)
    room.run()
    room.sequences[id].cancelled = True
    room.engine.step()
    assert len(room.audience.endings(id)) == 1
