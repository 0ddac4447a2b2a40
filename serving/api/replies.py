"""The bodies of answers as /openapi.json shows them. They describe what `answers` and the forms write; nothing is
built with them, and a test holds real answers against them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "deadline"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Reply):
    """Counters of the answer's speculation; null is a ratio without a denominator."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    alpha: float | None
    tested: int
    drafter_version: str


class Metrics(Reply):
    speculative_decoding: SpeculativeDecoding


class PromptLogprob(Reply):
    logprob: float
    rank: int | None = Field(description="Known of the likeliest only")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Answer(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str = Field(
        description="Names all that could change a seeded answer: weights, their format, and the engine's numerics"
    )
    usage: Usage
    metrics: Metrics


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="The stop string or token id that ended it")
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Alternative(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Reply):
    content: list[ChatToken]
    refusal: None


class Function(Reply):
    name: str
    arguments: str


class Call(Reply):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


class Health(Reply):
    status: Literal["ok"]
    replica: str


class Blocks(Reply):
    free: int
    total: int


class Readiness(Reply):
    status: Literal["loading", "ready", "draining", "failed"]
    replica: str
    message: str | None = None
    model: str | None = None
    target: str | None = None
    drafter_version: str | None = None
    running: int | None = None
    waiting: int | None = None
    blocks: Blocks | None = None
