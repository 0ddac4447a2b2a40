"""A grammar's state: masks along committed tokens and drafts, the end of the text, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch

from serving.engine.grammar import GrammarState, compile_grammar
from serving.engine.processing import Processing
from serving.engine.request import Grammar
from shared.errors import RequestError
from shared.trace import Sampling
from tests.tiny import END_ID, START, build_tiny_tokenizer
from tests.tiny_engine import request

VOCAB = 320
TOKENIZER = build_tiny_tokenizer(VOCAB)
PATTERN = "[a-c]{1,3}d?"


def start(kind: str = "regex", text: str = PATTERN, *, eos: frozenset[int] = frozenset({END_ID}), ignore_eos=False):
    return compile_grammar(TOKENIZER, Grammar(kind, text)).start(eos, ignore_eos=ignore_eos)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def allowed(state: GrammarState, ahead: list[int]) -> set[int]:
    mask = state.masks(ahead)[-1]
    assert mask is not None
    return set(mask.nonzero().flatten().tolist())


def could_follow(text: str) -> set[int]:
    """By trying every token and every end of the text, from the definition of the pattern."""
    ends = ["".join(tail) for n in range(5) for tail in itertools.product("abcd", repeat=n)]
    found = {t for t in range(3, VOCAB) if any(re.fullmatch(PATTERN, text + TOKENIZER.decode([t]) + e) for e in ends)}
    return found | ({END_ID} if re.fullmatch(PATTERN, text) else set())


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "cad"])
def test_masks_hold_exactly_what_can_still_become_a_sentence(text: str) -> None:
    state, ahead = start(), start()
    for token in ids(text):
        state.push(token)
    if not state.finished:
        assert allowed(state, []) == could_follow(text)
        assert allowed(ahead, ids(text)) == could_follow(text)  # drafts look the same as committed tokens


def test_looking_ahead_changes_nothing() -> None:
    state = start()
    state.push(ids("a")[0])
    before = allowed(state, [])
    for draft in (ids("bc"), ids("b"), ids("x"), [END_ID], ids("cb")):
        state.masks(draft)
        assert allowed(state, []) == before
    assert allowed(state, ids("c")) == could_follow("ac")
    state.push(ids("b")[0])
    assert allowed(state, ids("c")) == could_follow("abc")


def test_behind_an_impossible_draft_or_the_end_nothing_is_decided() -> None:
    assert [mask is None for mask in start().masks([*ids("a"), *ids("x"), *ids("a")])] == [False, False, True, True]
    assert [mask is None for mask in start().masks([*ids("a"), END_ID, *ids("a")])] == [False, False, True, True]
    assert [mask is None for mask in start().masks(ids("abcd"))][-1]


def test_a_sentence_that_nothing_can_follow_is_finished() -> None:
    state = start()
    for token in ids("ab"):
        state.push(token)
        assert not state.finished
    for token in ids("cd"):
        state.push(token)
    assert state.finished
    assert state.failure is None
    ended = start()
    ended.push(ids("a")[0])
    ended.push(END_ID)
    assert ended.finished


def test_every_end_of_the_text_is_allowed_where_the_grammar_accepts() -> None:
    both = frozenset({END_ID, 1})
    assert allowed(start(eos=both), []) & both == set()
    assert allowed(start(eos=both), ids("a")) & both == both
    state = start(eos=both)
    state.push(ids("a")[0])
    state.push(1)
    assert state.finished


def test_an_ignored_end_is_allowed_only_when_nothing_else_is() -> None:
    assert END_ID not in allowed(start(ignore_eos=True), ids("ab"))
    assert allowed(start(text="[ab]", ignore_eos=True), []) == {ids("a")[0], ids("b")[0]}


def test_the_kinds_of_grammar() -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    for kind, text, good in (
        ("json_object", "", '{"a": [1, null]}'),
        ("json_schema", schema, '{"n": -3}'),
        ("lark", 'start: "yes" | "no" " "* "!"', "no !"),
    ):
        state = start(kind, text)
        for token in ids(good):
            assert token in allowed(state, []), (kind, good)
            state.push(token)
        assert state.finished
        assert TOKENIZER.convert_tokens_to_ids(START) not in allowed(start(kind, text), [])
    assert ids("[")[0] not in allowed(start("json_object"), [])


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "unclosed group"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", "{", "json schema cannot be followed"),
        ("json_schema", "[1]", "JSON object"),
        ("json_schema", '{"type": "string", "not": {"type": "string"}}', "not"),
        ("lark", 'start: "a" | missing', "missing"),
        ("regex", r"[^\s\S]", "cannot be followed"),  # the last three have no sentence at all
        ("lark", "start: start", "cannot be followed"),
        ("json_schema", '{"$ref": "#"}', "cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused(kind: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        start(kind, text)
    assert caught.value.param == "response_format"
    assert "<state>" not in str(caught.value), "the library's dump is for its authors"


def test_a_tokenizer_of_words_is_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer") as caught:
        compile_grammar(build_tiny_tokenizer(16), Grammar("regex", "a"))
    assert caught.value.param == "response_format"


def test_min_tokens_masks_the_ends_in_each_row_in_turn() -> None:
    asked = request("r", [5], Sampling(), min_tokens=3, stop_token_ids=(9,), ignore_eos=False)
    processing = Processing.of(asked, frozenset({END_ID, 9}), None)
    assert processing is not None
    processing.push(4)
    masked = processing.target_rows(torch.zeros(4, 12), [4, 4, 4]) == float("-inf")
    assert masked.nonzero().tolist() == [[0, END_ID], [0, 9], [1, END_ID], [1, 9]]


def test_a_sentence_that_could_end_goes_on_until_min_tokens() -> None:
    asked = request("r", [5], Sampling(), min_tokens=6, ignore_eos=False)
    processing = Processing.of(asked, frozenset({END_ID}), start(text="a{2}|a{4}"))
    assert processing is not None
    rows = processing.target_rows(torch.zeros(4, VOCAB), ids("a") * 3)
    # After two a's the text could end, but is not owed to; after three it cannot.
    assert [END_ID in row.isfinite().nonzero() for row in rows] == [False] * 4


def test_min_tokens_does_not_mask_the_last_thing_that_a_grammar_leaves() -> None:
    only = ids("a")[0]
    asked = request("r", [5], Sampling(), min_tokens=6, stop_token_ids=(only,), ignore_eos=False)
    processing = Processing.of(asked, frozenset({END_ID, only}), start(text="ab"))
    assert processing is not None
    assert processing.target_rows(torch.zeros(1, VOCAB), [])[0].isfinite().nonzero().flatten().tolist() == [only]


def test_most_requests_need_no_processing() -> None:
    assert (
        Processing.of(request("r", [5], Sampling(top_k=3, top_p=0.4), ignore_eos=False), frozenset({2}), None) is None
    )
    assert Processing.of(request("r", [5], min_tokens=2), frozenset(), None) is None, "there is no end to mask"
