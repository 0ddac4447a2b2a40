"""What an engine tells the one who asked: text as it is committed, then exactly one ending (law 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EndReason = Literal["stop", "length", "cancelled", "failed", "deadline"]
# Why a request failed; whose fault that is follows from it (`serving.api.errors`).
FailureCode = Literal["invalid_grammar", "internal_error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the target's own logits, before any processing, and the likeliest others.

    All are finite.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), the likeliest first


@dataclass(frozen=True)
class Delta:
    """Newly visible text and the tokens committed since the last delta (text may lag behind tokens)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of the tokens, where the request asked for them


@dataclass(frozen=True)
class RequestStats:
    """Counters of one request's speculation; ratios are formed where they are shown."""

    num_steps: int = 0  # target forwards that committed something
    num_spec_steps: int = 0  # of them, with drafts
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    tested: int = 0
    accepted_lengths: tuple[int, ...] = ()  # index: drafts accepted in a speculation step; value: steps
    by_draft_length: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # the same, by drafts in the step
    num_spec_tokens: int = 0  # the most drafts that a step may have
    drafter_version: str = ""  # of the last speculation step


@dataclass(frozen=True)
class Failure:
    """Why one request can go no further, where the others can."""

    code: FailureCode
    message: str


@dataclass(frozen=True)
class Ending:
    """The terminal event. `message` says why when the reason is cancelled, failed or deadline.

    `code` stands in every failed ending and in no other.
    """

    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    stats: RequestStats
    message: str = ""
    stop_reason: str | int | None = None  # the stop string or the stop token id that ended it
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of each prompt token, None first; where asked for
    code: FailureCode | None = None

    def __post_init__(self) -> None:
        assert (self.code is not None) == (self.reason == "failed"), "a failure says whose fault it is"


Event = Delta | Ending
