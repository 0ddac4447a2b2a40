"""Text to token ids: a prompt as it stands, a conversation through the model's own chat template.

What the template refuses (an unknown role order, say) is the client's to mend, so it becomes a RequestError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serving.api.fields import encodable
from serving.api.formats import Tool
from serving.api.messages import AssistantMessage, Message, ToolCall, ToolMessage, text_of
from shared.errors import RequestError


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a plain prompt, with the special tokens that the tokenizer itself puts around a text."""
    return list(tokenizer(text)["input_ids"])


def encode_chat(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """Ids of the conversation and of the opening of the assistant's turn. Raises RequestError.

    `tools` are those that the model is to know of.
    """
    if not tokenizer.chat_template:
        raise RequestError(
            "This model has no chat template. Use /v1/completions.", param="messages", code="no_chat_template"
        )
    turns = [_turn(message, index) for index, message in enumerate(messages)]
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if shown and _render(tokenizer, turns, shown) == _render(tokenizer, turns, []):
        raise _no_tools("tools")
    for index, message in enumerate(messages):
        # A template that does not know of calls would leave this turn out without a word.
        is_call = isinstance(message, AssistantMessage) and message.tool_calls
        if is_call and _render(tokenizer, turns, shown) == _render(tokenizer, _without_calls(turns), shown):
            raise _no_tools(f"messages[{index}].tool_calls")
    return list(_apply(tokenizer, turns, shown, tokenize=True, return_dict=True)["input_ids"])


def _no_tools(param: str) -> RequestError:
    return RequestError(
        "The chat template of this model knows no tools. Leave them out.", param=param, code="tools_not_supported"
    )


def _turn(message: Message, index: int) -> dict[str, Any]:
    """The message as templates expect it: text in one piece, arguments as objects."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if isinstance(message, AssistantMessage):
        if message.content is None and not message.tool_calls:
            path = f"messages[{index}].content"
            raise RequestError(f"'{path}' is missing, and so are tool calls. Give one of them.", param=path)
        if message.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
                for call, arguments in zip(message.tool_calls, _arguments(message.tool_calls, index), strict=True)
            ]
    elif isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
    return turn


def _arguments(calls: Sequence[ToolCall], index: int) -> list[dict[str, Any]]:
    found = []
    for place, call in enumerate(calls):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or not encodable(arguments):
            path = f"messages[{index}].tool_calls[{place}].function.arguments"
            raise RequestError(f"'{path}' must be a JSON object, as Unicode text.", param=path)
        found.append(arguments)
    return found


def _without_calls(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in turns]


def _render(tokenizer: Any, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    return str(_apply(tokenizer, turns, tools, tokenize=False))


def _apply(tokenizer: Any, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], **how: Any) -> Any:
    import jinja2

    try:
        return tokenizer.apply_chat_template(list(turns), tools=list(tools) or None, add_generation_prompt=True, **how)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
