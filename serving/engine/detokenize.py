"""Tokens to text, one at a time: a character that spans tokens is held until whole, stop strings never leak.

Owns the text of one request. What `push` returns may be shown; what might still become a stop string, or is half a
character, is held back. Text before a stop string is complete, text from it on does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF = "\ufffd"
_PATIENCE = 8  # tokens that may end in undecodable bytes before these are shown as such


@dataclass(frozen=True)
class Piece:
    """Text that may be shown now, and the stop string that has ended the request, if one has."""

    text: str
    stop: str | None = None


class Detokenizer:
    """Incremental decoding of one request's committed tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), skip: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer, self._stop, self._skip = tokenizer, tuple(stop), skip
        self._window: list[int] = []  # ids that are decoded together: the last whole piece as context, and what follows
        self._whole = 0  # ids of the window whose text ended in a whole character
        self._taken = 0  # characters of the window's text that are already in `_held` or shown
        self._held = ""  # decoded but not shown
        self.shown = 0  # characters handed out

    @property
    def decoded(self) -> int:
        """Characters of all text so far, held ones included: where the next token's own begin."""
        return self.shown + len(self._held)

    def push(self, token_id: int, *, stoppable: bool = True) -> Piece:
        """The text that this token makes visible. Stop strings are looked for in the text of stoppable tokens."""
        if token_id in self._skip:
            return Piece("")
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_HALF):
            # Bytes that stay undecodable for so long are no text: only the last mark may still become a character.
            young = len(self._window) - self._whole < _PATIENCE
            self._take(text.rstrip(_HALF) if young else text[:-1])
        else:
            self._take(text)
            self._window = self._window[self._whole :]
            self._whole, self._taken = len(self._window), len(self._decode(self._window))
        return self._release() if stoppable else Piece(self._show(len(self._held)))

    def flush(self) -> str:
        """What was held back, once nothing more will come."""
        self._take(self._decode(self._window))
        return self._show(len(self._held))

    def _take(self, text: str) -> None:
        self._held += text[self._taken :]
        self._taken = max(self._taken, len(text))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _release(self) -> Piece:
        found = [(place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            place, stop = min(found, key=lambda pair: pair[0])
            text, self._held = self._show(place), ""
            return Piece(text, stop)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return Piece(self._show(len(self._held) - keep))

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.shown += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
