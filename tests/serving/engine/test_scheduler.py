"""Who runs next, and with how many rows: order, the prefill budget, and what happens when blocks run out."""

from __future__ import annotations

import pytest

from serving.engine.detokenize import Detokenizer
from serving.engine.engine import Engine, Limits
from serving.engine.kv import BlockAllocator
from serving.engine.request import GenerationRequest
from serving.engine.scheduler import Scheduler
from serving.engine.sequence import Sequence
from shared.errors import RequestError
from tests.fakes_target import TokenTarget
from tests.tiny import build_tiny_tokenizer
from tests.tiny_engine import fixed_gamma, request

TOKENIZER = build_tiny_tokenizer(16)


def sequence(id: str, prompt: int, *, read: int = 0, committed: int = 0) -> Sequence:
    made = Sequence(request(id, [3] * prompt, max_tokens=30), Detokenizer(TOKENIZER), None)
    made.tokens += [4] * committed
    made.kv_len = read
    return made


def scheduler(*sequences: Sequence, blocks: int = 64, batch: int = 8, prefill: int = 10) -> Scheduler:
    made = Scheduler(BlockAllocator(blocks, 4), max_batch=batch, prefill_tokens=prefill)
    for one in sequences:
        made.add(one)
    made.admit()
    return made


def plan(made: Scheduler, **gammas: int) -> list[tuple[str, int, int]]:
    works = made.plan(gammas)
    made.allocator.check([one.table for one in made])
    for work in works:
        rows = work.sequence.kv_len + work.count + work.gamma
        assert len(work.sequence.table) * 4 >= rows, "every row has its slot"
    return [(work.sequence.id, work.count, work.gamma) for work in works]


def test_prompts_share_the_budget_beside_decoding_requests_which_always_go() -> None:
    made = scheduler(sequence("a", 7), sequence("d", 5, read=5, committed=1), sequence("b", 9), sequence("c", 9))
    assert plan(made, d=3) == [("a", 7, 0), ("d", 1, 3), ("b", 3, 0)]


def test_a_long_prompt_is_read_in_pieces_and_decides_with_its_last() -> None:
    one = sequence("a", 23)
    made = scheduler(one)
    pieces = []
    while not one.decoding:
        (work,) = made.plan({})
        decides = work.decides
        pieces.append((work.count, decides))
        one.kv_len += work.count
        if decides:
            one.tokens.append(5)
    assert pieces == [(10, False), (10, False), (3, True)]


def test_first_come_first_served_up_to_the_batch() -> None:
    made = scheduler(*(sequence(name, 3) for name in "abcd"), batch=2)
    assert [one.id for one in made.running] == ["a", "b"]
    assert [one.id for one in made.waiting] == ["c", "d"]
    made.remove(made.running[0])
    made.admit()
    assert [one.id for one in made] == ["b", "c", "d"]


def test_a_prompt_without_room_waits_and_nobody_overtakes_it() -> None:
    made = scheduler(sequence("a", 11), sequence("long", 12), sequence("short", 2), blocks=6)
    assert [one.id for one in made.waiting] == ["long", "short"]


def test_drafts_give_way_before_requests_do() -> None:
    one, two = sequence("a", 7, read=7, committed=1), sequence("b", 7, read=7, committed=1)
    made = scheduler(one, two, blocks=7)  # three each, and one more for the first to ask
    assert plan(made, a=5, b=5) == [("a", 1, 5), ("b", 1, 0)]
    assert made.preemptions == 0


def test_the_youngest_is_put_back_at_the_head_of_the_queue() -> None:
    old, young, new = (
        sequence("old", 7, read=7, committed=1),
        sequence("young", 7, read=7, committed=1),
        sequence("new", 2),
    )
    made = scheduler(old, young, blocks=7)  # three each, and one to spare for the first
    made.add(new)
    old.tokens += [4] * 9
    old.kv_len = 16  # its next row needs a fifth block
    made.allocator.grow(old.table, 16)
    assert plan(made) == [("old", 1, 0)]
    assert [one.id for one in made.waiting] == ["young", "new"]
    assert (young.table, young.kv_len, made.preemptions) == ([], 0, 1)
    assert young.committed == 1, "what was committed stays committed"


# --- the door --------------------------------------------------------------------------------------------------


def engine(*, context: int = 40, blocks: int = 16) -> Engine:
    target = TokenTarget(blocks=blocks)
    return Engine(target, None, fixed_gamma(0), Limits(context, 4, 64), lambda *_: None)  # type: ignore[arg-type]


def asked(prompt: list[int], cap: int) -> GenerationRequest:
    return request("r", prompt, max_tokens=cap)


def test_what_fits_to_the_last_position_is_served() -> None:
    made = engine(context=20, blocks=5)
    made.check(asked([3] * 12, 8))
    made.add(asked([3] * 12, 8))
    while not made.idle:
        made.step()
    assert made.counters.total("emitted") == 8


@pytest.mark.parametrize(
    ("prompt", "cap", "context", "blocks", "param", "words"),
    [
        ([3] * 30, 11, 40, 16, "max_tokens", ("40 tokens", "41", "30", "11", "max_tokens to 10")),
        ([3] * 41, 5, 40, 16, "prompt", ("40 tokens", "46", "prompt to at most 39")),
        ([3] * 10, 11, 40, 5, "max_tokens", ("20 tokens", "21")),  # the cache is smaller than the context
        ([], 5, 40, 16, "prompt", ("empty",)),
        ([3, 16], 5, 40, 16, "prompt", ("16", "vocabulary")),
        ([-1], 5, 40, 16, "prompt", ("-1", "vocabulary")),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    prompt: list[int], cap: int, context: int, blocks: int, param: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        engine(context=context, blocks=blocks).check(asked(prompt, cap))
    assert caught.value.param == param
    for word in words:
        assert word in str(caught.value)
