"""The text of single tokens, under each way in which tokenizers write bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from serving.api.logprobs import TextLogprobs, TokenTexts, shown
from tests.fakes import fake_logprobs


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    for text in ("Hello there", "naïve – ∑ 日本", "\t\n\x00", "<|start|>x<|end|>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(texts.bytes_of(id) for id in ids) == text.encode()


def test_sentencepiece_marks_and_bytes() -> None:
    table = {"<unk>": 0, "\u2581Hi": 1, "there": 2, "<0xE2>": 3, "<0x41>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab=table, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [texts.bytes_of(id) for id in (1, 2, 3, 4)] == [b" Hi", b"there", b"\xe2", b"A"]
    assert texts.shown(3) == "bytes:\\xe2"
    assert texts.bytes_of(99) == b""  # beyond the vocabulary: a padded row


@pytest.mark.parametrize(("raw", "text"), [(b"a", "a"), ("ä".encode(), "ä"), (b"\xc3", "bytes:\\xc3"), (b"", "")])
def test_a_part_of_a_character_is_shown_as_bytes(raw: bytes, text: str) -> None:
    assert shown(raw) == text


def test_offsets_count_whole_characters_and_go_on_between_parts(tokenizer: Any) -> None:
    text = "aä∑b"
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(ids) == 1 + 2 + 3 + 1  # the tiny tokenizer knows bytes only, of such letters
    whole = TextLogprobs(TokenTexts(tokenizer)).part(ids, fake_logprobs(ids, 0))
    assert whole["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    parts = TextLogprobs(TokenTexts(tokenizer))
    cut = [parts.part((id,), fake_logprobs((id,), 0))["text_offset"][0] for id in ids]
    assert cut == whole["text_offset"]


def test_what_the_tokenizer_put_before_a_prompt_has_no_place_in_its_text(tokenizer: Any) -> None:
    ids = (1, *tokenizer("ab", add_special_tokens=False)["input_ids"])
    part = TextLogprobs(TokenTexts(tokenizer)).part(ids, [None, *fake_logprobs(ids[1:], 0)], hidden=1)
    assert part["text_offset"][:2] == [0, 0]


def test_a_token_is_always_among_its_alternatives(tokenizer: Any) -> None:
    [token] = fake_logprobs((70,), 2)
    from dataclasses import replace

    rare = replace(token, token_id=80, logprob=-9.0)
    [top] = TextLogprobs(TokenTexts(tokenizer)).part((80,), [rare])["top_logprobs"]
    assert len(top) == 3
    assert min(top.values()) == -9.0
