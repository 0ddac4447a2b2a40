"""The grammar that a body's words about form become."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from serving.api.constraint import calls_schema, grammar_of
from serving.api.formats import Tool
from serving.api.schema import ChatCompletionRequest
from serving.engine.grammar import compile_grammar
from serving.engine.request import Grammar
from shared.errors import RequestError
from tests.tiny import build_tiny_tokenizer


def grammar(**fields: Any) -> tuple[Grammar | None, str]:
    messages = [{"role": "user", "content": "x"}]
    return grammar_of(ChatCompletionRequest.model_validate({"model": "m", "messages": messages} | fields))


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "blamed"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
            "response_format",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA), "structured_outputs"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA), "structured_outputs"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: WORD"}}, "lark", "start: WORD", "structured_outputs"),
    ],
)
def test_each_form(fields: dict[str, Any], kind: str, text: str, blamed: str) -> None:
    assert grammar(**fields) == (Grammar(kind, text), blamed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"tools": [tool("f")]}, {"tool_choice": "none"}]
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert grammar(**fields)[0] is None


def test_choices_are_taken_letter_by_letter() -> None:
    choices = ["a.b", "c|d", "(e)", "f+ *?", "[g]{1}", "\\h^$", "i-j #&~", "ä"]
    found, _ = grammar(structured_outputs={"choice": choices})
    assert found is not None
    for choice in choices:
        assert re.fullmatch(found.text, choice)
    for wrong in ("axb", "c", "d", "e", "f", "g", "i"):
        assert not re.fullmatch(found.text, wrong)


def test_a_forced_call_is_one_of_the_tools() -> None:
    tools = [tool("add", SCHEMA), tool("now")]
    found, blamed = grammar(tools=tools, tool_choice="required")
    assert found is not None
    assert (found.kind, blamed) == ("json_schema", "tools")
    check = jsonschema.Draft202012Validator(json.loads(found.text))
    add, now = {"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {"any": "thing"}}
    for good in ([add], [now, add]):
        assert check.is_valid(good)
    wrong = {"name": "other", "arguments": {}}
    for bad in ([], add, [wrong], [{"name": "add", "arguments": {"a": "1"}}], [add | {"more": 1}], [{"name": "now"}]):
        assert not check.is_valid(bad)


def test_one_call_at_most_and_a_named_function() -> None:
    tools = [tool("add", SCHEMA), tool("now")]
    named = {"type": "function", "function": {"name": "now"}}
    found, _ = grammar(tools=tools, tool_choice=named, parallel_tool_calls=False)
    assert found is not None
    check = jsonschema.Draft202012Validator(json.loads(found.text))
    assert check.is_valid({"name": "now", "arguments": {}})
    assert not check.is_valid({"name": "add", "arguments": {"a": 1}})
    assert not check.is_valid([{"name": "now", "arguments": {}}])


def test_a_tools_own_definitions_are_still_found_within_the_whole() -> None:
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "same": {"$ref": "#"}},
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
        },
    }
    other = {"type": "object", "properties": {"x": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "string"}}}
    tools = [Tool.model_validate(tool("a", tree)), Tool.model_validate(tool("b", other))]
    check = jsonschema.Draft202012Validator(calls_schema(tools, several=False))
    deep = {"root": {"next": {"next": {"n": 1}}}, "same": {"root": {}}}
    assert check.is_valid({"name": "a", "arguments": deep})
    assert not check.is_valid({"name": "a", "arguments": {"root": {"next": {"n": "one"}}}})
    assert check.is_valid({"name": "b", "arguments": {"x": "text"}})
    assert not check.is_valid({"name": "b", "arguments": {"x": {}}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def chained(count: int) -> dict[str, Any]:
    """Each definition refers to the next: the grammar library calls itself as often."""
    following = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": following | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def named(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(count)}}


TOO_MUCH = [
    (nested(150), "nested more than 100 deep"),
    ({"maxItems": 10**9}, "more than 2,000 items and properties"),
    ({"maxItems": 10**400}, "more than 2,000 items and properties"),
    ({"properties": {"a": {"minLength": 10**6}}}, "more than 100,000 letters"),
    (named(1_000), "1,002 objects and booleans; the limit is 1,000"),
    ({"anyOf": [True] * 1_001}, "the limit is 1,000"),
    (chained(600), "the limit is 1,000"),
    ({"enum": list(range(10_001))}, "10,001 array elements; the limit is 10,000"),
    ({"patternProperties": {f"^x{i}": {} for i in range(51)}}, "51 patternProperties; the limit is 50"),
    ({"multipleOf": 10_007}, "multipleOf whose product is above 10,000"),
    ({"allOf": [{"multipleOf": 101}, {"multipleOf": 1.01}]}, "multipleOf"),
    ({"const": "a" * 10_001}, "a text of more than 10,000 characters"),
    ({"properties": {"a" * 10_001: {}}}, "a text of more than 10,000 characters"),
    ({"enum": ["a" * 9_999] * 11}, "longer than 100,000 characters"),
]


@pytest.mark.parametrize(("schema", "says"), TOO_MUCH, ids=lambda value: value if isinstance(value, str) else "")
def test_a_schema_that_would_cost_too_much_is_refused(schema: dict[str, Any], says: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields, param in (
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(schema)}}, "structured_outputs.json"),
        ({"tools": [tool("f", schema)], "tool_choice": "required"}, "tools[0].function.parameters"),
    ):
        with pytest.raises(RequestError) as refused:
            grammar(**fields)  # type: ignore[arg-type]
        assert (refused.value.param, refused.value.code) == (param, "schema_too_large")
        assert str(refused.value).startswith(f"'{param}' ")
        assert says in str(refused.value)


FAIR: list[dict[str, Any]] = [
    nested(90),
    {"maxItems": 2_000, "default": 10**9},
    named(998),
    chained(490),
    {"enum": [f"value {number}" for number in range(6_000)]},
    {"patternProperties": {f"^x{i}_[a-z]+$": {"type": "integer"} for i in range(50)}},
    {"multipleOf": 0.01},
    {"properties": {"a": {"multipleOf": 500}, "b": {"multipleOf": 0.2}}},
]


@pytest.mark.parametrize("schema", FAIR, ids=lambda schema: next(iter(schema)))
def test_what_is_not_too_much_is_compiled(schema: dict[str, Any]) -> None:
    """Up to the limits: in a second at most, which no test can time, and without an end of the process."""
    found, _ = grammar(structured_outputs={"json": schema})
    assert found is not None
    compile_grammar(build_tiny_tokenizer(320), found).start(frozenset(), ignore_eos=False).masks([])


def test_tools_are_bounded_together_and_a_grammar_holds_no_schema() -> None:
    half = named(499)
    assert grammar(tools=[tool("a", half)], tool_choice="required")[0] is not None
    with pytest.raises(RequestError, match="'tools' has 1,0"):
        grammar(tools=[tool("a", half), tool("b", half)], tool_choice="required")
    with pytest.raises(RequestError, match=r"Give that as 'structured_outputs\.json'"):
        grammar(structured_outputs={"grammar": 'start: %json {"type": "object"}'})


def test_a_schema_in_text_may_be_any_text() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        grammar(structured_outputs={"json": "[" * 100_000})
