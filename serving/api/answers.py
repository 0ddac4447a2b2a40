"""The JSON of answers: whole, and in chunks, for completions and for chat.

Shapes and key order follow OpenAI's reference; `metrics` is the one addition. Nothing is computed here but sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.api.metrics_view import metrics_of
from serving.engine.events import Ending


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


@dataclass
class Choice:
    """One generated text while it grows; `ending` is set last."""

    text: str = ""
    ending: Ending | None = None

    @property
    def finish_reason(self) -> str:
        assert self.ending is not None, "a choice is shown only when it has ended"
        return self.ending.reason


class Form(Protocol):
    """How one endpoint writes its answers."""

    prefix: str  # of ids
    kind: str  # `object` of a whole answer
    chunk_kind: str  # `object` of a chunk

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """The choice in a whole answer."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in the first chunk, before any text; None: there is none."""

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """The choice in a chunk of text."""

    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        """The choice in its last chunk."""


class TextForm:
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._choice(index, choice.text, choice.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, text, None)

    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._choice(index, "", choice.finish_reason)

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatForm:
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, {"content": text}, None)

    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._choice(index, {}, choice.finish_reason)

    def _choice(self, index: int, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def whole_answer(head: Head, form: Form, choices: Sequence[Choice]) -> dict[str, Any]:
    endings = _endings(choices)
    return head.object(form.kind) | {
        "choices": [form.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": _usage(endings),
        "metrics": metrics_of([ending.stats for ending in endings]),
    }


def chunk(head: Head, form: Form, choice: dict[str, Any], *, with_usage: bool) -> dict[str, Any]:
    """One chunk. Where the client asked for usage, each chunk says that it is not here yet."""
    body = head.object(form.chunk_kind) | {"choices": [choice]}
    return body | {"usage": None} if with_usage else body


def usage_chunk(head: Head, form: Form, choices: Sequence[Choice]) -> dict[str, Any]:
    endings = _endings(choices)
    return head.object(form.chunk_kind) | {
        "choices": [],
        "usage": _usage(endings),
        "metrics": metrics_of([ending.stats for ending in endings]),
    }


def _endings(choices: Sequence[Choice]) -> list[Ending]:
    return [choice.ending for choice in choices if choice.ending is not None]


def _usage(endings: Sequence[Ending]) -> dict[str, int]:
    prompt = sum(ending.prompt_tokens for ending in endings)
    completion = sum(ending.completion_tokens for ending in endings)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
