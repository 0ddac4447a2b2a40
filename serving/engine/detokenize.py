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
    """Text that may be shown now, and whether a stop string has ended the request."""

    text: str
    stopped: bool = False


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

    def push(self, token_id: int) -> Piece:
        """The text that this token makes visible."""
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
        return self._release()

    def flush(self) -> str:
        """What was held back, once nothing more will come."""
        self._take(self._decode(self._window))
        rest, self._held = self._held, ""
        return rest

    def _take(self, text: str) -> None:
        self._held += text[self._taken :]
        self._taken = max(self._taken, len(text))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _release(self) -> Piece:
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return Piece(text, stopped=True)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Piece(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
