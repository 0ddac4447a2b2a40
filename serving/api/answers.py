"""An answer while it grows, and the JSON that both endpoints share; their own shapes are in the `_form` modules.

Shapes and key order follow OpenAI's reference; `metrics` is the one addition that is always there, the others follow
vLLM and come when asked for. Nothing is computed here but sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.api.metrics_view import metrics_of
from serving.engine.events import Delta, Ending, Event, TokenLogprob


@dataclass(frozen=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str

    def object(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True)
class PromptView:
    """A prompt as an answer may repeat it."""

    ids: tuple[int, ...]
    text: str = ""  # where it is echoed
    hidden: int = 0  # ids at its beginning that the tokenizer added: they are not in the text


@dataclass
class Choice:
    """One generated text while it grows; `ending` is set last."""

    prompt: PromptView
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None

    def take(self, item: Event) -> None:
        if isinstance(item, Ending):
            self.ending = item
        else:
            self.text += item.text
            self.token_ids += item.token_ids
            self.logprobs += item.logprobs

    @property
    def end(self) -> Ending:
        assert self.ending is not None, "a choice is shown only when it has ended"
        return self.ending

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, by which the best of several is chosen."""
        return sum(token.logprob for token in self.logprobs) / max(1, len(self.logprobs))


class Form(Protocol):
    """How one endpoint writes one answer. It keeps what a stream has to remember."""

    kind: str  # `object` of a whole answer
    chunk_kind: str  # `object` of a chunk

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """`choices` of a whole answer, and what else stands beside them."""

    def chunks(self, choice: Choice, item: Event) -> Iterator[dict[str, Any]]:
        """The same of each chunk that this event makes; the choice has taken the event already."""


def whole_answer(head: Head, form: Form, choices: Sequence[Choice], generated: Sequence[Choice]) -> dict[str, Any]:
    """`generated` are all choices, those of `best_of` that are not shown included: they were worked for."""
    return head.object(form.kind) | form.whole(choices) | _account(generated)


def chunk(head: Head, form: Form, body: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    """One chunk; `usage` is a dictionary with that field, or empty."""
    return head.object(form.chunk_kind) | body | usage


def usage_chunk(head: Head, form: Form, choices: Sequence[Choice]) -> dict[str, Any]:
    return head.object(form.chunk_kind) | {"choices": []} | _account(choices)


def usage_of(choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens so far. A prompt counts once, however many choices it has."""
    prompts = {id(choice.prompt): len(choice.prompt.ids) for choice in choices}
    completion = sum(choice.ending.completion_tokens if choice.ending else len(choice.token_ids) for choice in choices)
    prompt = sum(prompts.values())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _account(choices: Sequence[Choice]) -> dict[str, Any]:
    return {"usage": usage_of(choices), "metrics": metrics_of([choice.end.stats for choice in choices])}


def said_something(item: Event) -> bool:
    return isinstance(item, Delta) and bool(item.text or item.token_ids)
