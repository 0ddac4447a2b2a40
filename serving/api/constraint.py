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

_DEEPEST = 100  # objects and arrays within each other in a schema; the grammar library reads no more than 128
# What a schema may count in all. Items and properties are dear: ten thousand of them take the library ten seconds.
_MOST_ITEMS, _ITEMS = 2_000, ("minItems", "maxItems", "minProperties", "maxProperties")
_MOST_LETTERS, _LETTERS = 100_000, ("minLength", "maxLength")
_META = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~])")


def grammar_of(body: Generation) -> tuple[Grammar | None, str]:
    """(the grammar, the field to blame if it cannot be compiled). Raises RequestError."""
    if isinstance(body, ChatCompletionRequest) and body.calling == "forced":
        for index, tool in enumerate(body.tools or ()):
            require_modest(tool.function.parameters, f"tools[{index}].function.parameters")
        several = body.parallel_tool_calls is not False
        return Grammar("json_schema", json.dumps(calls_schema(body.forced_tools, several=several))), "tools"
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
    require_modest(schema, "structured_outputs.json")
    return Grammar("json_schema", json.dumps(schema))


def require_modest(schema: Any, param: str) -> None:
    """Raises RequestError for a schema that would cost the service more than any answer is worth."""
    level, items, letters = [schema], 0, 0
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                items += _sum(item, _ITEMS)
                letters += _sum(item, _LETTERS)
            elif isinstance(item, list):
                below += item
        if items > _MOST_ITEMS or letters > _MOST_LETTERS:
            most = f"{_MOST_ITEMS} items and properties and {_MOST_LETTERS} letters"
            raise RequestError(f"'{param}' counts more than {most} in all. Leave such bounds out.", param=param)
        if not below:
            return
        level = below
    raise RequestError(f"'{param}' is nested more than {_DEEPEST} deep. Flatten it.", param=param)


def _sum(schema: dict[str, Any], names: Sequence[str]) -> int:
    """Of whole numbers however long; what is no whole number is the grammar library's to refuse."""
    found: int = sum(schema[name] for name in names if isinstance(schema.get(name), int))
    return found


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
