"""Reads tool calls out of a model's text while it comes: what is content, what is a call, and a call's arguments.

Two ways of writing a call are known: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and any
number (Hermes, Qwen and others), and bare JSON of that form, one object or an array, where the whole answer is one
(Llama 3 writes `parameters`). A bare call must name a tool that the request brought; else it is content.
Invariant: what was handed out is never taken back, and text that turns out to be no call is handed out as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])'
)
_PLAIN_HEAD = '{{"name":"{name}","{key}":'
_TYPED_HEAD = '{{"type":"function","name":"{name}","{key}":'


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the call's arguments; all pieces together are JSON if the model wrote JSON."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class CallReader:
    """Of one answer. `push` text as it comes, then `finish` once."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        """`names` of the tools; without `parallel`, what follows the first call is dropped."""
        self._parallel = parallel
        self._bare_heads = [
            head.format(name=name, key=key)
            for name in names
            for key in ("arguments", "parameters")
            for head in (_PLAIN_HEAD, _TYPED_HEAD)
        ]
        self._text = ""  # not handed out yet
        self._state: Callable[[], Iterator[Piece] | None] = self._at_start
        self._value = _Value()
        self._bare = False
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while (found := self._state()) is not None:
            pieces += found
        return [piece for piece in pieces if not isinstance(piece, Content) or piece.text]

    def finish(self) -> list[Piece]:
        """What was held back, once no more text will come."""
        rest, self._text = self._text, ""
        if self._state == self._in_call:  # cut off, or written in an order of its own and never closed
            return [] if self._bare else list(self._whole(rest, closed=False))
        if self._state == self._in_arguments or (self._state == self._after_arguments and not self._bare):
            return []
        if self._state == self._after_arguments:
            rest = rest.lstrip().removeprefix("}").lstrip().removeprefix("]")
        blank = self.calls > 0 and not rest.strip()
        return [] if blank else list(self._say(rest))

    @property
    def _dropping(self) -> bool:
        return self.calls > 0 and not self._parallel

    # Each state takes what it can from `_text` and sets the next; None means that it needs more text.

    def _at_start(self) -> Iterator[Piece] | None:
        compact = "".join(self._text.split())
        if not compact:
            return None
        first = compact.removeprefix("[")
        if not first or any(head.startswith(first) for head in self._bare_heads):
            return None
        self._bare = any(first.startswith(head) for head in self._bare_heads)
        if not self._bare:
            self._state = self._in_content
            return iter(())
        if not _HEAD.match(self._text.lstrip().removeprefix("[")):
            # The value is still to come, or is neither an object nor text, which no tool takes.
            if compact.endswith(":"):
                return None
            self._bare, self._state = False, self._in_content
            return iter(())
        self._text = self._text.lstrip().removeprefix("[")
        self._state = self._in_call
        return iter(())

    def _in_content(self) -> Iterator[Piece] | None:
        """Hands out all but white space at the end and what may begin a call: both belong to a call if one follows."""
        place = self._text.find(OPEN)
        if place < 0:
            shown = self._text[: len(self._text) - _beginning(self._text, OPEN)].rstrip()
            self._text = self._text[len(shown) :]
            return self._say(shown) if shown else None
        shown, self._text = self._text[:place].rstrip(), self._text[place + len(OPEN) :]
        self._state = self._in_call
        return self._say(shown)

    def _in_call(self) -> Iterator[Piece] | None:
        head = _HEAD.match(self._text)
        if head is not None:
            self._text = self._text[head.end() :]
            self._value, self._state = _Value(), self._in_arguments
            return self._start(head[1])
        if self._bare:
            return None
        body, closed, rest = self._text.partition(CLOSE)
        if not closed:
            return None
        self._text, self._state = rest, self._in_content
        return self._whole(body, closed=True)

    def _in_arguments(self) -> Iterator[Piece] | None:
        taken = self._value.take(self._text)
        self._text = self._text[taken:]
        if self._value.whole:
            self._state = self._after_arguments
        piece = self._value.text()
        return self._say_arguments(piece) if piece or self._value.whole else None

    def _after_arguments(self) -> Iterator[Piece] | None:
        """The rest of the call's object, and what stands between calls."""
        if self._bare:
            rest = self._text.lstrip().removeprefix("}").lstrip()
            if not rest.startswith(","):
                return None
            self._text, self._state = rest[1:], self._in_call
            return iter(())
        _, closed, rest = self._text.partition(CLOSE)
        if not closed:
            return None
        self._text, self._state = rest, self._in_content
        return iter(())

    def _say(self, text: str) -> Iterator[Piece]:
        if text and not self._dropping:
            yield Content(text)

    def _start(self, name: str) -> Iterator[Piece]:
        self.calls += 1
        if self.calls == 1 or self._parallel:
            yield CallStart(self.calls - 1, name)

    def _say_arguments(self, text: str) -> Iterator[Piece]:
        if text and (self.calls == 1 or self._parallel):
            yield CallArguments(self.calls - 1, text)

    def _whole(self, body: str, *, closed: bool) -> Iterator[Piece]:
        """A call in an order of its own, or what only looked like one."""
        try:
            call: Any = json.loads(body)
        except (ValueError, RecursionError):
            call = None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            yield from self._say(OPEN + body + (CLOSE if closed else ""))
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        yield from self._start(call["name"])
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield from self._say_arguments(text)


class _Value:
    """One JSON value, an object or a string, while it comes; a string's content is JSON itself."""

    def __init__(self) -> None:
        self.whole = False
        self._raw, self._shown = "", 0
        self._depth, self._in_string, self._escaped = 0, False, False

    def take(self, text: str) -> int:
        """Characters of `text` that belong to the value."""
        for place, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            if not self._depth and not self._in_string:
                self._raw += text[: place + 1]
                self.whole = True
                return place + 1
        self._raw += text
        return len(text)

    def text(self) -> str:
        """What has come since the last call. A string is handed out at its end, when its escapes are known."""
        if self._raw.startswith('"'):
            if not self.whole or self._shown:
                return ""
            self._shown = len(self._raw)
            try:
                return str(json.loads(self._raw))
            except ValueError:
                return self._raw
        piece, self._shown = self._raw[self._shown :], len(self._raw)
        return piece


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
