"""From what a body says of the answer's form to the grammar that the engine holds it to.

A forced tool call is constrained as plain JSON whatever markup the model's template teaches: it is parsed before a
client sees it, and the template writes its own markup when the call comes back as history. It compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from serving.api.formats import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs, Tool
from serving.api.schema import ChatCompletionRequest, Generation
from serving.engine.request import Grammar
from shared.errors import RequestError

_META = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~])")


def grammar_of(body: Generation) -> tuple[Grammar | None, str]:
    """(the grammar, the field to blame if it cannot be compiled). Raises RequestError."""
    if isinstance(body, ChatCompletionRequest) and body.calling == "forced":
        several = body.parallel_tool_calls is not False
        return Grammar("json_schema", json.dumps(calls_schema(body.forced_tools, several=several))), "tools"
    if isinstance(body.format, JsonObjectFormat):
        return Grammar("json_object"), "response_format"
    if isinstance(body.format, JsonSchemaFormat):
        return Grammar("json_schema", json.dumps(body.format.json_schema.schema_)), "response_format"
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs), "structured_outputs"
    return None, ""


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.grammar is not None:
        return Grammar("lark", wanted.grammar)
    if wanted.choice is not None:
        return Grammar("regex", "|".join(_META.sub(r"\\\1", choice) for choice in wanted.choice))
    if wanted.json_ is None:
        return Grammar("json_object")
    if isinstance(wanted.json_, str):
        try:
            schema = json.loads(wanted.json_)
        except ValueError as error:
            raise RequestError(
                f"'structured_outputs.json' is not JSON: {error}.", param="structured_outputs.json"
            ) from error
        return Grammar("json_schema", json.dumps(schema))
    return Grammar("json_schema", json.dumps(wanted.json_))


def calls_schema(tools: Sequence[Tool], *, several: bool) -> dict[str, Any]:
    """JSON Schema of one call, `{"name": ..., "arguments": ...}`, or of an array of at least one."""
    definitions = {
        f"tool{index}": _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/tool{index}")
        for index, tool in enumerate(tools)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": call, "minItems": 1} if several else call
    return schema | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself as they must be once it stands at `place` in another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }
