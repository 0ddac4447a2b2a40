"""The turns of a conversation as clients send them, tool calls and their results included.

An assistant's turn may be an earlier answer of ours, sent back as it was.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from serving.api.fields import Neutral, Strict, Text, by_kind, choose

_NOTHING: tuple[Any, ...] = (None, [])


class TextPart(Strict):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("(string)")] | Annotated[list[TextPart], Tag("(parts)"), Field(min_length=1)],
    Discriminator(
        choose({str: "(string)", list: "(parts)"}),
        custom_error_type="content_type",
        custom_error_message="must be a string or an array of text parts",
    ),
]


class CalledFunction(Strict):
    name: Annotated[Text, Field(min_length=1, max_length=64)]
    arguments: Annotated[Text, Field(description="A JSON object, as text")]


class ToolCall(Strict):
    NEUTRAL: ClassVar[Neutral] = {"index": (None, *range(128))}  # a chunk's field that clients keep

    id: Annotated[Text, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction


class SystemMessage(Strict):
    NEUTRAL: ClassVar[Neutral] = {"name": (None,), "tool_call_id": (None,), "tool_calls": _NOTHING}

    role: Literal["system"]
    content: Content


class DeveloperMessage(Strict):
    """A system message under its newer name."""

    NEUTRAL: ClassVar[Neutral] = SystemMessage.NEUTRAL

    role: Literal["developer"]
    content: Content


class UserMessage(Strict):
    NEUTRAL: ClassVar[Neutral] = SystemMessage.NEUTRAL

    role: Literal["user"]
    content: Content


class AssistantMessage(Strict):
    NEUTRAL: ClassVar[Neutral] = {
        "annotations": _NOTHING,
        "audio": (None,),
        "function_call": (None,),
        "name": (None,),
        "refusal": (None,),
        "tool_call_id": (None,),
    }

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None


class ToolMessage(Strict):
    NEUTRAL: ClassVar[Neutral] = {"tool_calls": _NOTHING}

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(max_length=64)] | None = Field(default=None, description="Of the tool that answered")


Message = Annotated[
    Annotated[SystemMessage, Tag("(system)")]
    | Annotated[DeveloperMessage, Tag("(developer)")]
    | Annotated[UserMessage, Tag("(user)")]
    | Annotated[AssistantMessage, Tag("(assistant)")]
    | Annotated[ToolMessage, Tag("(tool)")],
    by_kind("role", "system", "developer", "user", "assistant", "tool"),
]


def text_of(content: str | list[TextPart] | None) -> str:
    """The content as one string; parts are separate lines."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
