"""What the request bodies are built from: strictness, fields that may only be neutral, and unions told apart by type.

Invariant: a field is honoured or refused by name, never ignored. A field of the OpenAI API that is not honoured may be
sent with its neutral value (what the API assumes when it is left out); everything else is unknown. Types are strict:
JSON numbers are not strings, booleans are not numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
# Error types of ours: a field (in the context) that only may be neutral, one whose name is not even text, and an object
# of which the field that is named behind the colon says that it is none of those that we know.
UNSUPPORTED, UNREADABLE, UNKNOWN_KIND = "unsupported_field", "unreadable_field", "unknown_kind:"
T = TypeVar("T")
Neutral = Mapping[str, tuple[Any, ...]]  # field -> the values that ask for nothing


def _show_neutral(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """/openapi.json says of these fields which values they may have."""
    neutral: Neutral = getattr(model, "NEUTRAL", {})
    for name, values in neutral.items():
        schema.setdefault("properties", {})[name] = {
            "enum": list(values),
            "description": "Not supported; may be sent with a value that asks for nothing.",
        }


class Strict(BaseModel):
    """Every body and every object in one. `NEUTRAL` names what is accepted and means nothing."""

    NEUTRAL: ClassVar[Neutral] = {}

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, json_schema_extra=_show_neutral
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in values:
            if not encodable(name):  # pydantic would blame the object, and cannot carry such a name
                raise PydanticCustomError(UNREADABLE, "is unknown", {"field": printable(name)})
        for name in cls.NEUTRAL.keys() & values.keys():
            if not any(_same(values[name], accepted) for accepted in cls.NEUTRAL[name]):
                raise PydanticCustomError(UNSUPPORTED, "is not supported by this service", {"field": name})
        return {name: value for name, value in values.items() if name not in cls.NEUTRAL}


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def choose(kinds: Mapping[type, str], inner: Mapping[type, str] | None = None) -> Any:
    """A discriminator by JSON type: of the value, or of the first element if it is an array."""

    def tag(value: Any) -> str | None:
        if isinstance(value, list) and inner is not None:
            return inner.get(type(value[0])) if value else next(iter(inner.values()))
        return kinds.get(type(value))

    return tag


def by_kind(field: str, *kinds: str) -> Discriminator:
    """Tells objects apart by the text in `field`. The tag is that text in brackets, which paths in errors leave out."""

    def tag(value: Any) -> str | None:
        kind = value.get(field) if isinstance(value, dict) else getattr(value, field, None)
        return f"({kind})" if kind in kinds else None

    return Discriminator(
        tag,
        custom_error_type=UNKNOWN_KIND + field,
        custom_error_message="must be one of " + ", ".join(f'"{kind}"' for kind in kinds),
    )


def printable(text: str) -> str:
    """What a client sent may be quoted back, and may not be encodable."""
    return text.encode("utf-8", "backslashreplace").decode()


def encodable(value: Any) -> bool:
    """Whether a JSON value can be written again: JSON can escape one half of a surrogate pair, which is no text."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _require_encodable(value: T) -> T:
    if not encodable(value):
        raise PydanticCustomError("text_encoding", NO_TEXT if isinstance(value, str) else NO_SCHEMA)
    return value


NO_TEXT = "must be Unicode text; it has half a surrogate pair"
NO_SCHEMA = f"{NO_TEXT}, or is nested too deep"
Text = Annotated[str, AfterValidator(_require_encodable)]
Schema = Annotated[dict[str, Any], AfterValidator(_require_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = Annotated[
    Annotated[Text, Tag("(string)")]
    | Annotated[list[Text], Tag("(strings)")]
    | Annotated[list[TokenId], Tag("(tokens)")]
    | Annotated[list[list[TokenId]], Tag("(token arrays)")],
    Discriminator(
        choose({str: "(string)"}, {str: "(strings)", int: "(tokens)", list: "(token arrays)"}),
        custom_error_type="prompt_type",
        custom_error_message="must be a string, an array of strings, an array of token ids, or an array of such arrays",
    ),
]
StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("(string)")] | Annotated[list[StopText], Tag("(strings)"), Field(max_length=MAX_STOPS)],
    Discriminator(
        choose({str: "(string)", list: "(strings)"}),
        custom_error_type="stop_type",
        custom_error_message="must be a string or an array of strings",
    ),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]
