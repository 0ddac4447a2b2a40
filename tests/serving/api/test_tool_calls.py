"""Calls are read out of a model's text, the same however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.tool_calls import CallArguments, CallReader, CallStart, Content

NAMES = ("weather", "add")
ADD = '{"a": 1, "b": [2, {"c": "}]"}]}'
# Text of a model, the content that is left, the calls.
READINGS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello there.", "Hello there.", []),
    ("  spaces stay \n", "  spaces stay \n", []),
    ("a < b and <tool", "a < b and <tool", []),
    (f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', "", [("add", ADD)]),
    (f'Let me see.\n\n<tool_call>{{"name":"add","arguments":{ADD}}}</tool_call>', "Let me see.", [("add", ADD)]),
    (
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "weather", "arguments": '
        '{"city": "\\"<tool_call>\\" \\u00e9"}}</tool_call>\n',
        "",
        [("add", "{}"), ("weather", '{"city": "\\"<tool_call>\\" \\u00e9"}')],
    ),
    # Hermes markup is plain enough for a tool that nobody gave.
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),  # never closed
    ("<tool_call>no JSON</tool_call> so?", "<tool_call>no JSON</tool_call> so?", []),
    ('<tool_call>\n{"na', '<tool_call>\n{"na', []),  # cut by the cap
    ('<tool_call>{"name": "add", "arguments": {"a"', "", [("add", '{"a"')]),
    (f'{{"name": "add", "arguments": {ADD}}}', "", [("add", ADD)]),
    (f' \n{{ "name" : "add" , "parameters" : {ADD} }} ', "", [("add", ADD)]),
    (f'{{"type": "function", "name": "add", "parameters": {ADD}}}', "", [("add", ADD)]),
    (
        f'[{{"name": "add", "arguments": {ADD}}}, {{"name": "weather", "arguments": {{}}}}]',
        "",
        [("add", ADD), ("weather", "{}")],
    ),
    (f'[{{"name": "add", "arguments": {ADD}}}, {{"na', "", [("add", ADD)]),
    ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ('{"name": "add", "arguments": 5}', '{"name": "add", "arguments": 5}', []),
    ('{"name": "addition", "arguments": {}}', '{"name": "addition", "arguments": {}}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("[1, 2]", "[1, 2]", []),
    ('The call is {"name": "add", "arguments": {}}', 'The call is {"name": "add", "arguments": {}}', []),
]


def read(pieces: Sequence[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as a client puts them together."""
    reader = CallReader(NAMES, parallel=parallel)
    found = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    content, calls = "", list[list[str]]()
    for piece in found:
        if isinstance(piece, Content):
            assert piece.text, "an empty piece was handed out"
            content += piece.text
        elif isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        else:
            assert isinstance(piece, CallArguments)
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.text
    assert reader.calls >= len(calls)
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("text", "content", "calls"), READINGS)
def test_what_is_content_and_what_is_a_call(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    text, content, calls = data.draw(st.sampled_from(READINGS))
    cuts = data.draw(st.lists(st.integers(0, len(text))))
    pieces = [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]
    assert read(pieces) == (content, calls)


@given(st.text(alphabet='<tool_cal>/{}[]":, \\namerguts1') | st.text())
def test_nothing_is_lost_of_a_text_without_calls(text: str) -> None:
    content, calls = read(list(text))
    if not calls:
        assert content == text


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), _VALUES, max_size=3), st.booleans(), st.booleans())
def test_arguments_come_out_as_they_were_written(arguments: dict[str, Any], hermes: bool, readable: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=not readable)
    call = f'{{"name": "add", "arguments": {written}}}'
    assert read(list(f"<tool_call>{call}</tool_call>" if hermes else call)) == ("", [("add", written)])


def test_without_parallel_calls_the_first_is_all_there_is() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read([call + call + "and more"], parallel=False) == ("", [("add", "{}")])
    assert read(['[{"name":"add","arguments":{}},{"name":"weather","arguments":{}}]'], parallel=False)[1] == [
        ("add", "{}")
    ]


def test_content_and_arguments_are_not_held_longer_than_they_must() -> None:
    reader = CallReader(NAMES)
    assert reader.push("Hello") == [Content("Hello")]
    assert reader.push(" <tool") == []  # the beginning of a call, and the space that would belong to it
    assert reader.push("box>") == [Content(" <toolbox>")]
    assert reader.push('<tool_call>{"name": "add", "arguments": {"a": ') == [
        CallStart(0, "add"),
        CallArguments(0, '{"a": '),
    ]
    assert reader.push("1") == [CallArguments(0, "1")]
    bare = CallReader(NAMES)
    assert bare.push('{"ans') == [Content('{"ans')]  # no tool is called so
