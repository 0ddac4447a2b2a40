"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serving.api.answers import Choice
from serving.api.logprobs import TextLogprobs, TokenTexts, prompt_logprobs
from serving.api.schema import CompletionRequest
from serving.engine.events import Delta, Event


class TextForm:
    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, texts: TokenTexts) -> None:
        self._texts = texts
        self._echo, self._logprobs = bool(body.echo), body.logprobs is not None
        self._prompt_logprobs, self._ids = body.prompt_logprobs is not None, bool(body.return_token_ids)
        self._streamed: dict[int, TextLogprobs] = {}  # by index, once a choice has begun

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"choices": [self._whole(choice) for choice in choices]}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        end, prompt = choice.end, choice.prompt
        logprobs = None
        if self._logprobs:
            before = (prompt.ids, end.prompt_logprobs) if self._echo else ((), ())
            logprobs = TextLogprobs(self._texts).part(
                [*before[0], *choice.token_ids], [*before[1], *choice.logprobs], hidden=prompt.hidden
            )
        body = self._choice(choice, prompt.text + choice.text, logprobs) | {
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,
        }
        if self._prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._texts, end.prompt_logprobs)
        if self._ids:
            body |= {"prompt_token_ids": list(prompt.ids), "token_ids": choice.token_ids}
        return body

    def chunks(self, choice: Choice, item: Event) -> Iterator[dict[str, Any]]:
        first = choice.index not in self._streamed
        if first:
            self._streamed[choice.index] = TextLogprobs(self._texts)
        if not isinstance(item, Delta):
            if first and self._echo:
                yield self._chunk(choice, choice.prompt.text, None, first=True)
            closing = {"finish_reason": item.reason, "stop_reason": item.stop_reason}
            yield {"choices": [self._choice(choice, "", None) | closing]}
            return
        text = choice.prompt.text + item.text if first else item.text  # the prompt's is empty without echo
        if text or ((self._logprobs or self._ids) and item.token_ids):
            yield self._chunk(choice, text, item, first=first)
        elif first:
            del self._streamed[choice.index]  # nothing to show yet

    def _chunk(self, choice: Choice, text: str, item: Delta | None, *, first: bool) -> dict[str, Any]:
        ids = item.token_ids if item else ()
        logprobs = None
        if self._logprobs and item is not None:
            logprobs = self._streamed[choice.index].part(ids, item.logprobs)
        body = self._choice(choice, text, logprobs)
        if self._ids:
            body |= ({"prompt_token_ids": list(choice.prompt.ids)} if first else {}) | {"token_ids": list(ids)}
        return {"choices": [body]}

    @staticmethod
    def _choice(choice: Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
