"""The request bodies of the OpenAI API as far as this service honours them.

Invariant: a field is honoured or refused by name, never ignored. Fields of the API that are not honoured may be sent
with their neutral value (what the API assumes when they are left out); everything else is unknown. Types are strict:
JSON numbers are not strings, booleans are not numbers. It knows nothing of models, tokenizers or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from shared.errors import RequestError

MAX_STOPS = 16
DOMAIN_PATTERN = r"[A-Za-z0-9_.\-]{1,64}"  # it becomes part of counter keys

# Field -> the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_OF_COMPLETIONS = frozenset({"best_of", "echo", "suffix"})
_OF_CHAT = frozenset(_NEUTRAL) - _OF_COMPLETIONS
_OF_BOTH = frozenset({"frequency_penalty", "logit_bias", "logprobs", "n", "presence_penalty", "repetition_penalty"})
# What clients send back when they return an answer of ours as the next request's history.
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _without_neutral(values: Any, neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> Any:
    """`values` without the fields that ask for nothing; RequestError for one that asks for something."""
    if not isinstance(values, dict):
        return values
    for name in neutral.keys() & values.keys():
        if not any(_same(values[name], accepted) for accepted in neutral[name]):
            raise RequestError(
                f"'{where}{name}' is not supported by this service. Leave it out.",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )
    return {name: value for name, value in values.items() if name not in neutral}


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _choose(kinds: Mapping[type, str], inner: Mapping[type, str] | None = None) -> Any:
    """A discriminator by JSON type: of the value, or of the first element if it is an array."""

    def tag(value: Any) -> str | None:
        if isinstance(value, list) and inner is not None:
            return inner.get(type(value[0])) if value else next(iter(inner.values()))
        return kinds.get(type(value))

    return tag


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("text_encoding", "must be Unicode text; it has half a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Prompt = Annotated[
    Annotated[Text, Tag("(string)")]
    | Annotated[list[Text], Tag("(strings)")]
    | Annotated[list[Annotated[int, Field(ge=0)]], Tag("(tokens)")]
    | Annotated[list[list[Annotated[int, Field(ge=0)]]], Tag("(token arrays)")],
    Discriminator(
        _choose({str: "(string)"}, {str: "(strings)", int: "(tokens)", list: "(token arrays)"}),
        custom_error_type="prompt_type",
        custom_error_message="must be a string, an array of strings, an array of token ids, or an array of such arrays",
    ),
]
StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("(string)")] | Annotated[list[StopText], Tag("(strings)"), Field(max_length=MAX_STOPS)],
    Discriminator(
        _choose({str: "(string)", list: "(strings)"}),
        custom_error_type="stop_type",
        custom_error_message="must be a string or an array of strings",
    ),
]


class StreamOptions(_Strict):
    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, values: Any) -> Any:
        return _without_neutral(values, {"include_obfuscation": (None, False)}, "stream_options.")


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("(string)")] | Annotated[list[TextPart], Tag("(parts)"), Field(min_length=1)],
        Discriminator(
            _choose({str: "(string)", list: "(parts)"}),
            custom_error_type="content_type",
            custom_error_message="must be a string or an array of text parts",
        ),
    ]

    @property
    def text(self) -> str:
        """The content as one string; parts are separate lines."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class _Generation(_Strict):
    """What both endpoints share. None means left out."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1 is off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[Text, Field(max_length=256)] | None = None
    metadata: Annotated[dict[str, Annotated[Text, Field(max_length=512)]], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = Field(default=None, description="Go on after the end token (for benchmarks).")
    speculative: bool | None = Field(default=None, description="false decodes without a drafter.")

    @model_validator(mode="after")
    def _together(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed with 'stream': true.", param="stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Generation):
    prompt: Prompt

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, values: Any) -> Any:
        return _without_neutral(values, {name: _NEUTRAL[name] for name in _OF_COMPLETIONS | _OF_BOTH})


class ChatCompletionRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, values: Any) -> Any:
        values = _without_neutral(values, {name: _NEUTRAL[name] for name in _OF_CHAT})
        if isinstance(values, dict) and isinstance(values.get("messages"), list):
            values["messages"] = [
                _without_neutral(message, _NEUTRAL_IN_MESSAGE, f"messages[{index}].")
                for index, message in enumerate(values["messages"])
            ]
        return values

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError(
                "'max_tokens' and 'max_completion_tokens' differ. Give one of them.", param="max_completion_tokens"
            )
        return self
