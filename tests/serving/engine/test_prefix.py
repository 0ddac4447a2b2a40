"""Who shares which blocks, and when, over a target whose cache spells the text: a wrong block is a wrong token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.engine.engine import Engine, Limits
from serving.engine.request import GenerationRequest
from tests.fakes_drafters import PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer
from tests.tiny_engine import fixed_gamma, request, serve

SIZE = 4  # of a TokenTarget's blocks


def prompt(length: int, *, last: Sequence[int] = ()) -> list[int]:
    return [*((5 * i) % 13 + 3 for i in range(length - len(last))), *last]


def run(*asked: GenerationRequest, batch: int = 1, blocks: int = 64, prefix_cache: bool = True) -> tuple[int, Engine]:
    """Rows that the target read, and the engine."""
    target = TokenTarget(blocks=blocks, block_size=SIZE)
    answers, engine = serve(
        target,
        PlaybackDrafter({r.id: greedy_answer(r.prompt_ids, 40) for r in asked}, wrong=lambda place: place % 5 == 2),
        asked,
        fixed_gamma(2),
        max_batch=batch,
        prefill_tokens=16,
        prefix_cache=prefix_cache,
    )
    for r in asked:
        assert list(answers[r.id].token_ids) == greedy_answer(r.prompt_ids, r.params.max_tokens)
    return target.rows, engine


def reused(engine: Engine) -> int:
    assert engine.prefix is not None
    return engine.prefix.reused


def test_a_second_request_reads_only_what_the_first_did_not() -> None:
    asked = [request(name, prompt(21), max_tokens=6) for name in "ab"]
    alone, _ = run(asked[0])
    both, engine = run(*asked)
    assert both == 2 * alone - 16, "four full blocks; the fifth is followed by nothing that would name it"
    assert reused(engine) == 16
    assert run(*asked, prefix_cache=False)[0] == 2 * alone


def test_tenants_share_nothing() -> None:
    first, second = (
        request("a", prompt(21), max_tokens=6),
        replace(request("b", prompt(21), max_tokens=6), tenant="other"),
    )
    _, engine = run(first, second)
    assert reused(engine) == 0


def test_an_answer_is_a_beginning_too() -> None:
    """The next turn of a conversation repeats the prompt and the answer."""
    first = request("a", prompt(9), max_tokens=20)
    text = [*first.prompt_ids, *greedy_answer(first.prompt_ids, 20)]
    _, engine = run(first, request("b", [*text, 5, 6], max_tokens=4))
    assert reused(engine) == 28, "of 29 tokens, each of the seven blocks with the token after it"


@pytest.mark.parametrize(("place", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_block_is_shared_with_the_token_after_it_or_not_at_all(place: int, expected: int) -> None:
    """A head's row reads the next token: the last row of a block would else be of another text."""
    other = prompt(14)
    other[place] = 19 - other[place]
    _, engine = run(request("a", prompt(14), max_tokens=2), request("b", other, max_tokens=2))
    assert reused(engine) == expected


def test_two_tokens_are_always_read() -> None:
    for length, expected in ((9, 4), (10, 8), (11, 8), (13, 8), (14, 12)):
        _, engine = run(*(request(name, prompt(length), max_tokens=8) for name in "ab"))
        assert reused(engine) == expected, length


def test_choices_of_one_prompt_that_arrive_together_share_it() -> None:
    asked = [request(f"r-{i}", prompt(45), max_tokens=6) for i in range(4)]
    alone, _ = run(asked[0])
    four, engine = run(*asked, batch=4)
    assert reused(engine) == 3 * 40
    assert four == 4 * alone - 3 * 40


def test_a_small_common_piece_keeps_nobody_waiting() -> None:
    """Six tokens alike of fifteen: to wait a step for them would cost more than it saves."""
    asked = [request(name, [*prompt(6), *[3 + i] * 2], max_tokens=3) for i, name in enumerate("ab")]
    target = TokenTarget(block_size=SIZE)
    engine = Engine(target, None, fixed_gamma(0), Limits(64, 4, 64), lambda *_: None)  # type: ignore[arg-type]
    sequences = [engine.add(one) for one in asked]
    engine.step()
    assert [s.committed for s in sequences] == [1, 1]


def test_what_is_asked_for_logprobs_of_its_prompt_reads_all_of_it() -> None:
    plain = request("a", prompt(21), max_tokens=6)
    params = plain.params.__class__(**{**vars(plain.params), "prompt_logprobs": 0})
    target = TokenTarget(block_size=SIZE)
    engine = Engine(target, None, fixed_gamma(0), Limits(64, 1, 64), lambda *_: None)  # type: ignore[arg-type]
    engine.add(plain)
    engine.add(GenerationRequest("b", plain.prompt_ids, params))
    engine.add(GenerationRequest("c", plain.prompt_ids, plain.params))
    sizes = {}
    while not engine.idle:
        engine.step()
        sizes.update({s.id: reused(engine) for s in engine.scheduler})
    assert sizes == {"a": 0, "b": 0, "c": 16}


def test_cached_blocks_are_free_and_go_the_longest_unused_first() -> None:
    asked = [request(name, [3 + i] * 9, max_tokens=2) for i, name in enumerate("abc")]
    again = [request(f"{one.id}2", one.prompt_ids, max_tokens=2) for one in asked]
    _, engine = run(*asked, *again, blocks=64)
    assert reused(engine) == 3 * 4
    # Room for five: each takes three, so a's two blocks are gone when c has come, and b's while a comes again.
    _, engine = run(*asked, *again, blocks=5)
    assert reused(engine) == 0
    # Asked for in between, a stays.
    _, engine = run(asked[0], asked[1], again[0], blocks=7)
    assert reused(engine) == 4
    assert engine.allocator.free == 7


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_gives_the_same_answers(seed: int) -> None:
    """Random families of prompts over few blocks, with preemption and eviction; blocks are checked at each step."""
    rng = random.Random(seed)
    stems = [[rng.randint(3, 15) for _ in range(30)] for _ in range(3)]
    asked = [
        request(
            f"r{i}",
            [*rng.choice(stems)[: rng.randint(1, 30)], *(rng.randint(3, 5) for _ in range(rng.randint(1, 6)))],
            max_tokens=rng.randint(1, 24),
        )
        for i in range(30)
    ]
    rows, engine = run(*asked, batch=rng.randint(2, 6), blocks=rng.randint(18, 30))
    assert reused(engine) > 0
    assert rows > 0
