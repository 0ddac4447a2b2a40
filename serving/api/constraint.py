"""From what a body says of the answer's form to the grammar that the engine holds it to.

A forced tool call is constrained as plain JSON whatever markup the model's template teaches: it is parsed before a
client sees it, and the template writes its own markup when the call comes back as history. It compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from serving.api.fields import NO_SCHEMA, encodable
from serving.api.formats import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs, Tool
from serving.api.modest import require_modest
from serving.api.schema import ChatCompletionRequest, Generation
from serving.engine.request import Grammar
from shared.errors import RequestError

_META = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~])")


def grammar_of(body: Generation) -> tuple[Grammar | None, str]:
    """(the grammar, the field to blame if it cannot be compiled). Raises RequestError."""
    if isinstance(body, ChatCompletionRequest) and body.calling == "forced":
        for index, tool in enumerate(body.tools or ()):
            require_modest(tool.function.parameters, f"tools[{index}].function.parameters")
        schema = calls_schema(body.forced_tools, several=body.parallel_tool_calls is not False)
        require_modest(schema, "tools")  # together, too
        return Grammar("json_schema", json.dumps(schema)), "tools"
    if isinstance(body.format, JsonObjectFormat):
        return Grammar("json_object"), "response_format"
    if isinstance(body.format, JsonSchemaFormat):
        schema = body.format.json_schema.schema_
        require_modest(schema, "response_format.json_schema.schema")
        return Grammar("json_schema", json.dumps(schema)), "response_format"
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs), "structured_outputs"
    return None, ""


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.grammar is not None:
        if "%json" in wanted.grammar:  # nobody would bound it
            message = "'structured_outputs.grammar' holds a JSON Schema. Give that as 'structured_outputs.json'."
            raise RequestError(message, param="structured_outputs.grammar")
        return Grammar("lark", wanted.grammar)
    if wanted.choice is not None:
        return Grammar("regex", "|".join(_META.sub(r"\\\1", choice) for choice in wanted.choice))
    if wanted.json_ is None:
        return Grammar("json_object")
    schema: Any = wanted.json_
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            message = f"'structured_outputs.json' is not JSON: {error}."
            raise RequestError(message, param="structured_outputs.json") from error
        if not encodable(schema):
            raise RequestError(f"'structured_outputs.json' {NO_SCHEMA}.", param="structured_outputs.json")
    require_modest(schema, "structured_outputs.json")
    return Grammar("json_schema", json.dumps(schema))


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
