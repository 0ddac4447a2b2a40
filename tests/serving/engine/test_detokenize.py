"""Streamed text equals the text decoded at once, up to the first stop string; nothing is ever taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from serving.engine.detokenize import Detokenizer
from tests.tiny import END_ID, build_tiny_tokenizer

VOCAB = 420  # bytes, and pairs of them; some pairs are half a character
TOKENIZER: PreTrainedTokenizerFast = build_tiny_tokenizer(VOCAB)
TEXTS = st.text(alphabet="aábc é中\n😀z", max_size=12)
STREAMS = st.one_of(
    st.lists(st.integers(3, VOCAB - 1), max_size=40),
    TEXTS.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False)),
    # Halves of characters, some of which become whole.
    st.lists(st.sampled_from(TOKENIZER.encode("😀中éa", add_special_tokens=False)), max_size=30),
)
STOPS = st.lists(st.text(alphabet="abc é中\n", min_size=1, max_size=4), max_size=3)


def decoded(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def expected(ids: list[int], stops: list[str]) -> tuple[str, int | None]:
    """The text of the whole stream, or up to the stop string that is complete first, and after how many tokens."""
    for count in range(1, len(ids) + 1):
        text = decoded(ids[:count])
        found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        if found:
            return text[: min(found)], count
    return decoded(ids), None


def streamed(ids: list[int], stops: list[str]) -> tuple[list[str], int | None]:
    detokenizer = Detokenizer(TOKENIZER, stops)
    pieces: list[str] = []
    for count, token in enumerate(ids, 1):
        piece = detokenizer.push(token)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, count
    pieces.append(detokenizer.flush())
    return pieces, None


@settings(max_examples=300, deadline=None)
@given(STREAMS, STOPS)
@example(TOKENIZER.encode("😀", add_special_tokens=False)[:1] * 30, [])  # a first byte, again and again
@example([*TOKENIZER.encode("😀", add_special_tokens=False)[:3] * 4, *TOKENIZER.encode("😀")], [])
@example(TOKENIZER.encode("ab中ab", add_special_tokens=False), ["中a", "b中ab"])
def test_streamed_text_is_the_decoded_text_up_to_the_stop(ids: list[int], stops: list[str]) -> None:
    pieces, stopped = streamed(ids, stops)
    text, at = expected(ids, stops)
    assert stopped == at
    assert "".join(pieces) == text


@settings(max_examples=150, deadline=None)
@given(STREAMS, STOPS)
def test_no_piece_gives_away_the_beginning_of_a_stop_string(ids: list[int], stops: list[str]) -> None:
    pieces, stopped = streamed(ids, stops)
    shown = ""
    for piece in pieces[:-1] if stopped is None else pieces:
        shown += piece
        for stop in stops:
            assert stop not in shown
    # What was shown before the end never had to be taken back: it is a prefix of the final text.
    assert expected(ids, stops)[0].startswith(shown)


def test_a_character_is_shown_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("é中😀", add_special_tokens=False)
    pieces, _ = streamed(ids, [])
    assert [piece for piece in pieces if piece] == ["é", "中", "😀"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    ids = TOKENIZER.encode("a😀", add_special_tokens=False)[:-1]
    assert "".join(streamed(ids, [])[0]) == decoded(ids) == "a\ufffd"


def test_a_possible_stop_is_held_until_it_is_none() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["abz"])
    a, b, c = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    assert [detokenizer.push(token).text for token in (c, a, b, c)] == ["c", "", "", "abc"]


@pytest.mark.parametrize("skip", [frozenset({END_ID}), frozenset()])
def test_the_end_token_is_text_only_where_it_does_not_end(skip: frozenset[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, (), skip)
    assert detokenizer.push(END_ID).text == ("" if skip else "<|end|>")
    assert detokenizer.flush() == ""
