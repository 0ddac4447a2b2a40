"""The request bodies of the OpenAI API as far as this service honours them, and which fields exclude each other.

It knows nothing of models, tokenizers or HTTP.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from serving.api.fields import LogitBias, Neutral, Prompt, Stop, Strict, Text, TokenId
from serving.api.formats import NamedChoice, ResponseFormat, StructuredOutputs, TextFormat, Tool, ToolChoice
from serving.api.messages import Message
from serving.engine.request import LEAST_REPETITION
from shared.errors import RequestError

MOST_CHOICES = 128
MOST_ALTERNATIVES = 20  # log-probabilities shown beside each token's own
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Strict):
    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="Usage so far in every chunk")


class Generation(Strict):
    """What both endpoints share. None means left out."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1 is off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION, le=2, description="1 is off")] | None = None
    logit_bias: LogitBias | None = Field(default=None, description="Token id, as text, to what is added to its logit")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, description="The same answer again, as long as system_fingerprint is the same"
    )
    n: Choices | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = Field(default=None, description="Go on after the end token (for benchmarks).")
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[Text, Field(max_length=256)] | None = Field(
        default=None, description="For clients that send it; whose request it is follows from the API key alone"
    )
    metadata: Annotated[dict[Text, Annotated[Text, Field(max_length=512)]], Field(max_length=16)] | None = Field(
        default=None, description="'domain' is what the learner and the counters group by"
    )
    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(
        default=None, description="A higher one is started first; 0 when left out"
    )
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        default=None, description="Seconds from arrival after which the answer is what has been said by then"
    )
    speculative: bool | None = Field(default=None, description="false decodes without a drafter.")

    @model_validator(mode="after")
    def _together(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed with 'stream': true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("'prompt_logprobs' cannot be streamed. Leave 'stream' out.", param="prompt_logprobs")
        if self.format is not None and self.structured_outputs is not None:
            raise RequestError(
                "'response_format' and 'structured_outputs' both say what the answer is. Give one of them.",
                param="structured_outputs",
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def format(self) -> ResponseFormat | None:
        """The response format, if it asks for something."""
        return None if isinstance(self.response_format, TextFormat) else self.response_format

    @property
    def choices(self) -> int:
        """Choices shown for each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers generated for each prompt."""
        return self.choices


class CompletionRequest(Generation):
    NEUTRAL: ClassVar[Neutral] = {"suffix": (None, "")}

    prompt: Prompt
    best_of: Choices | None = Field(
        default=None, description="Generate so many, show the n with the highest mean log-probability"
    )
    echo: bool | None = None
    logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def _of_completions(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.choices:
            raise RequestError(f"'best_of' must be at least 'n' ({self.choices}).", param="best_of")
        if self.candidates > self.choices and self.stream:
            raise RequestError("'best_of' cannot be streamed: the best is known at the end.", param="best_of")
        if self.echo and self.stream and self.logprobs is not None:
            raise RequestError("'echo' with 'logprobs' cannot be streamed. Leave 'stream' out.", param="echo")
        return self

    @property
    def candidates(self) -> int:
        return self.best_of or self.choices


class ChatCompletionRequest(Generation):
    NEUTRAL: ClassVar[Neutral] = {
        "audio": (None,),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "reasoning_effort": (None,),
        "safety_identifier": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call an answer")

    @model_validator(mode="after")
    def _of_chat(self) -> ChatCompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError(
                "'max_tokens' and 'max_completion_tokens' differ. Give one of them.", param="max_completion_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed with 'logprobs': true.", param="top_logprobs")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError("'tools' has two functions of one name.", param="tools")
        wanted = self.tool_choice
        if wanted not in (None, "none", "auto") and not names:
            raise RequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
        if isinstance(wanted, NamedChoice) and wanted.function.name not in names:
            raise RequestError(
                f"'tool_choice' names '{wanted.function.name}', which is not in 'tools'.", param="tool_choice"
            )
        if self.calling is None:
            return
        if self.format is not None or self.structured_outputs is not None:
            param = "response_format" if self.format is not None else "structured_outputs"
            raise RequestError(
                f"'{param}' and 'tools' both say what the answer is. Send 'tool_choice': \"none\" with the format.",
                param=param,
            )
        if self.calling == "auto" and any(tool.function.strict for tool in self.tools or ()):
            raise RequestError(
                "'strict' functions need a 'tool_choice' that forces a call (\"required\" or a named function).",
                param="tools",
            )

    @property
    def calling(self) -> Literal["auto", "forced"] | None:
        """Whether the model may or must call a tool; None: it knows of none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return "auto" if self.tool_choice in (None, "auto") else "forced"

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called, where `calling` is forced."""
        if isinstance(self.tool_choice, NamedChoice):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == wanted]
        return list(self.tools or ())
