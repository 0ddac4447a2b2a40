"""Answers of /v1/chat/completions, tool calls included."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from serving.api.answers import Choice
from serving.api.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from serving.api.schema import ChatCompletionRequest
from serving.api.tool_calls import CallArguments, CallReader, CallStart, Content, Piece
from serving.engine.events import Delta, Ending, Event, TokenLogprob


class ChatForm:
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, texts: TokenTexts) -> None:
        self._texts = texts
        self._logprobs, self._ids = bool(body.logprobs), bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._parallel = body.parallel_tool_calls is not False
        self._tools = [tool.function.name for tool in body.tools or ()] if body.calling else None
        self._readers: dict[int, CallReader | None] = {}  # by index, once a choice has begun

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        body: dict[str, Any] = {"choices": [self._whole(choice) for choice in choices]}
        prompt, end = choices[0].prompt, choices[0].end  # a conversation is one prompt
        if self._prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._texts, end.prompt_logprobs)
        if self._ids:
            body["prompt_token_ids"] = list(prompt.ids)
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        content, calls = self._read(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        body = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_of(choice.logprobs),
            "finish_reason": _reason(choice.end, len(calls)),
            "stop_reason": choice.end.stop_reason,
        }
        return body | ({"token_ids": choice.token_ids} if self._ids else {})

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        reader = self._reader()
        if reader is None:
            return text, []
        content, calls = "", list[dict[str, Any]]()
        for piece in (*reader.push(text), *reader.finish()):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                calls.append(_call(piece.name))
            else:
                calls[piece.index]["function"]["arguments"] += piece.text
        return content, calls

    def chunks(self, choice: Choice, item: Event) -> Iterator[dict[str, Any]]:
        if choice.index not in self._readers:
            self._readers[choice.index] = self._reader()
            opening = self._chunk(choice, {"role": "assistant", "content": ""})
            yield opening | ({"prompt_token_ids": list(choice.prompt.ids)} if self._ids else {})
        reader = self._readers[choice.index]
        if isinstance(item, Delta):
            pieces = reader.push(item.text) if reader else [Content(item.text)] if item.text else []
            yield from self._said(choice, pieces, item)
            return
        if reader is not None:
            yield from self._said(choice, reader.finish(), None)
        closing = self._chunk(choice, {})
        reason = _reason(item, reader.calls if reader else 0)
        closing["choices"][0] |= {"finish_reason": reason, "stop_reason": item.stop_reason}
        yield closing

    def _said(self, choice: Choice, pieces: Sequence[Piece], item: Delta | None) -> Iterator[dict[str, Any]]:
        """A chunk for each piece; the tokens come with the first."""
        deltas = [_delta(piece) for piece in pieces]
        if not deltas and item is not None and item.token_ids and (self._logprobs or self._ids):
            deltas = [{}]
        for place, delta in enumerate(deltas):
            tokens = item if place == 0 else None
            body = self._chunk(choice, delta)
            if self._logprobs and tokens is not None:
                body["choices"][0]["logprobs"] = self._logprobs_of(tokens.logprobs)
            if self._ids:
                body["choices"][0]["token_ids"] = list(tokens.token_ids) if tokens else []
            yield body

    def _reader(self) -> CallReader | None:
        return CallReader(self._tools, parallel=self._parallel) if self._tools is not None else None

    def _logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._texts, tokens) if self._logprobs else None

    @staticmethod
    def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]}


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return {"tool_calls": [{"index": piece.index} | _call(piece.name)]}


def _call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}


def _reason(end: Ending, calls: int) -> str:
    return "tool_calls" if calls and end.reason == "stop" else end.reason
