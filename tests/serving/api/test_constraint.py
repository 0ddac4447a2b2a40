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
from serving.engine.request import Grammar
from shared.errors import RequestError


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


@pytest.mark.parametrize(
    "schema", [nested(150), {"maxItems": 10**9}, {"maxItems": 10**400}, {"properties": {"a": {"minLength": 10**6}}}]
)
def test_a_schema_that_would_cost_too_much_is_refused(schema: dict[str, Any]) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields, param in (
        ({"response_format": named}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(schema)}}, "structured_outputs.json"),
        ({"tools": [tool("f", schema)], "tool_choice": "required"}, "tools[0].function.parameters"),
    ):
        with pytest.raises(RequestError) as refused:
            grammar(**fields)  # type: ignore[arg-type]
        assert refused.value.param == param
    assert grammar(structured_outputs={"json": nested(90)})[0] is not None
    assert grammar(structured_outputs={"json": {"maxItems": 2_000, "default": 10**9}})[0] is not None


def test_a_schema_in_text_may_be_any_text() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        grammar(structured_outputs={"json": "[" * 100_000})
