"""Log-probabilities as the two endpoints write them, and the text of single tokens.

A token is shown as the text that it adds, or, where it is a part of a character, as `bytes:\\xe2\\x80`, OpenAI's form
for it. `bytes` are always exact. The numbers are the target's own, before temperature, penalties and masks.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from serving.engine.events import TokenLogprob

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's mark


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the letters from 256 on, in their order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_of_letter()


class TokenTexts:
    """The text and bytes of single tokens of one tokenizer, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level: bool | None = None
        self._added: dict[int, str] = {}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def shown(self, token_id: int) -> str:
        return shown(self.bytes_of(token_id))

    def _read(self, token_id: int) -> bytes:
        if self._byte_level is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            self._byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
            added = self._tokenizer.added_tokens_decoder
            self._added = {int(id): str(token) for id, token in added.items()}
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # an id of the padding
            return b""
        if self._byte_level and all(letter in _BYTES for letter in token):
            return bytes(_BYTES[letter] for letter in token)
        if one := _BYTE.fullmatch(token):
            return bytes([int(one[1], 16)])
        return str(token).replace(_SPACE, " ").encode("utf-8", "replace")


def shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        _entry(texts, token.token_id, token.logprob)
        | {"top_logprobs": [_entry(texts, id, logprob) for id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.shown(id), "logprob": logprob, "bytes": list(texts.bytes_of(id))}


class TextLogprobs:
    """The completions' form of one choice, in as many parts as it is streamed in: offsets go on."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token

    def part(
        self, token_ids: Sequence[int], tokens: Sequence[TokenLogprob | None], *, hidden: int = 0
    ) -> dict[str, Any]:
        """`hidden`: how many of the first tokens add no text (those that a tokenizer puts before a prompt)."""
        offsets = []
        for place, id in enumerate(token_ids):
            offsets.append(self._offset)
            if place >= hidden:
                self._offset += len(self._decoder.decode(self._texts.bytes_of(id)))
        return {
            "tokens": [self._texts.shown(id) for id in token_ids],
            "token_logprobs": [token.logprob if token else None for token in tokens],
            "top_logprobs": [self._alternatives(token) if token else None for token in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest, and the token itself where it is not among them."""
        found: dict[str, float] = {}
        for id, logprob in (*token.top, (token.token_id, token.logprob)):
            found.setdefault(self._texts.shown(id), logprob)
        return found


def prompt_logprobs(texts: TokenTexts, tokens: Iterable[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: of each prompt token, id to log-probability; the rank is known of the likeliest only."""
    return [_ranked(texts, token) if token else None for token in tokens]


def _ranked(texts: TokenTexts, token: TokenLogprob) -> dict[str, Any]:
    ranks = {id: (rank, logprob) for rank, (id, logprob) in enumerate(token.top, 1)}
    own = {token.token_id: ranks.get(token.token_id, (None, token.logprob))}
    return {
        str(id): {"logprob": logprob, "rank": rank, "decoded_token": texts.shown(id)}
        for id, (rank, logprob) in (own | ranks).items()
    }
