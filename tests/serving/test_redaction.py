"""What is private ends the trace in front of it: neither its ids nor what was computed from it leaves the replica."""

from __future__ import annotations

import importlib.util
import sys
import threading
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from serving.api.logprobs import TokenTexts
from serving.redaction import Redaction, cut, first_private, load_redactor
from shared.errors import ConfigError
from shared.trace import Round, TraceRecord, decode, encode
from tests.learner.records import random_record
from tests.tiny import build_tiny_tokenizer

VOCAB = 320  # byte-level


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(build_tiny_tokenizer(VOCAB))


def names(text: str) -> list[tuple[int, int]]:
    """Every "Ann" is private."""
    return [(place, place + 3) for place in range(len(text)) if text.startswith("Ann", place)]


def ids_of(text: str) -> list[int]:
    return [int(token) for token in build_tiny_tokenizer(VOCAB)(text, add_special_tokens=False)["input_ids"]]


def record_of(prompt: str, output: str) -> TraceRecord:
    """Every position has a top-k; two drafts a round, of which the first is kept and the second falls."""
    prompt_ids, output_ids = ids_of(prompt), ids_of(output)
    record = random_record(3, prompt=len(prompt_ids), outputs=len(output_ids), vocab=VOCAB)
    rounds = tuple(Round(start, "base", (output_ids[start], 7), 1, 2) for start in range(1, len(output_ids) - 1, 2))
    rejected = np.array([(round_.start + 1, 7) for round_ in rounds], dtype=np.int32).reshape(-1, 2)
    return replace(
        record,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        output_ids=np.array(output_ids, dtype=np.int32),
        rounds=rounds,
        rejected=rejected,
        rejected_probs=np.full(len(rejected), 0.5, dtype=np.float32),
    )


def passed(texts: TokenTexts, record: TraceRecord, redactor: Any = names) -> tuple[list[Any], dict[str, int]]:
    """What comes out behind the redaction, with features that count the rows, and its counters."""
    out: list[Any] = []
    redaction = Redaction(redactor, texts, lambda *item: out.append(item), queue_size=8, rows=10**6)
    rows = len(record.prompt_ids) + len(record.output_ids) - 1
    redaction.offer(record, torch.arange(rows)[:, None].half())
    redaction.stop()
    return out, redaction.counters


@pytest.mark.parametrize("before", ["", "x", "dear ", "née – 東京 ", "🙂🙂 "])
def test_the_first_private_token_is_found_whatever_bytes_come_before(texts: TokenTexts, before: str) -> None:
    ids = ids_of(before + "Ann is here")
    place = first_private(ids, texts, names)
    raw = [texts.bytes_of(token) for token in ids]
    assert b"Ann" not in b"".join(raw[:place])
    assert b"Ann".startswith(raw[place].lstrip()[:1])
    kept = b"".join(raw[:place])
    assert before.encode().startswith(kept), "and nothing that is not private is lost but a shared token"
    assert len(before.encode()) - len(kept) <= 1
    assert first_private(ids_of(before), texts, names) == len(ids_of(before))


def test_half_a_character_shifts_nothing(texts: TokenTexts) -> None:
    broken = [*ids_of("é")[:1], *ids_of("Ann")]
    assert first_private(broken, texts, names) == 1


def test_nothing_private_passes_unchanged(texts: TokenTexts) -> None:
    record = record_of("hello there", "general greeting")
    [(found, features)], counters = passed(texts, record)
    assert found is record
    assert len(features) == len(record.prompt_ids) + len(record.output_ids) - 1
    assert not any(counters.values())


def test_a_private_prompt_leaves_nothing(texts: TokenTexts) -> None:
    out, counters = passed(texts, record_of("my name is Ann", "hello"))
    assert out == []
    assert counters["redacted_whole"] == 1


def test_a_private_answer_is_cut_with_everything_that_was_computed_from_it(texts: TokenTexts) -> None:
    record = record_of("who are you?", "well, I am Ann of course")
    [(found, features)], counters = passed(texts, record)
    assert counters["redacted_cut"] == 1
    prompt, n = len(found.prompt_ids), len(found.output_ids)
    assert 0 < n < len(record.output_ids)
    assert b"A" not in b"".join(texts.bytes_of(int(token)) for token in found.output_ids)
    assert len(features) == prompt + n - 1
    assert features[-1] == prompt + n - 2, "no row read a private token"
    assert found.topk_positions.max() < n
    assert found.rejected[:, 0].max() < n
    assert all(round_.start + len(round_.drafted) <= n for round_ in found.rounds)
    assert {len(found.kinds), len(found.probs)} == {n}
    assert len(found.topk_positions) == n, "what came before is all there"
    assert encode(decode(encode(found))) == encode(found), "it is a whole record"


@pytest.mark.parametrize("committed", range(1, 9))
def test_a_cut_record_is_whole_wherever_it_is_cut(committed: int) -> None:
    found = cut(record_of("abc", "defghijklmnop"), committed)
    assert len(decode(encode(found)).output_ids) == committed
    assert sum(round_.accepted for round_ in found.rounds) <= committed


@pytest.mark.parametrize("spans", [[(0, 10**6)], [(-1, 2)], [(5, 2)], [("a", "b")], None])
def test_a_redactor_that_errs_lets_nothing_through(texts: TokenTexts, spans: Any) -> None:
    out, counters = passed(texts, record_of("hello there", "friend"), lambda _text: spans)
    assert out == []
    assert counters["redaction_failed"] == 1


def test_a_slow_redactor_holds_up_nobody_and_is_bounded(texts: TokenTexts) -> None:
    go, out = threading.Event(), list[Any]()

    def slow(text: str) -> list[tuple[int, int]]:
        go.wait(20)
        return []

    record = record_of("abc", "def")
    rows = len(record.prompt_ids) + len(record.output_ids) - 1
    redaction = Redaction(slow, texts, lambda *item: out.append(item), queue_size=2, rows=rows)
    for _ in range(9):
        redaction.offer(record, torch.zeros(rows, 1).half())
    go.set()
    redaction.stop()
    dropped = redaction.counters["redaction_dropped"]
    assert dropped in (6, 7)  # two wait; a third is with the redactor already, or is not
    assert len(out) == 9 - dropped
    assert any(features is None and not record.has_features for record, features in out)


@pytest.mark.parametrize("name", ["", "nothing", "no_such_module:spans", "json:no_such", "json:loads"])
def test_a_redactor_that_cannot_be_used_is_a_wrong_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.redactor"):
        load_redactor(name)


def test_a_redactor_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("redactor_of_a_test")
    module.names = names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert load_redactor("redactor_of_a_test:names") is names


@pytest.mark.skipif(
    importlib.util.find_spec("presidio_analyzer") is None, reason="pip install 'redraft[privacy]' would run it"
)
def test_presidio_finds_what_has_a_pattern_without_any_model() -> None:
    redactor = load_redactor("serving.presidio:spans")
    text = "Write to ann.smith@example.com, card 4111 1111 1111 1111."
    found = {text[start:end] for start, end in redactor(text)}
    assert {"ann.smith@example.com", "4111 1111 1111 1111"} <= found
    assert redactor("SELECT name FROM users ORDER BY age") == []
