"""Hours of generation survive a kill at any byte, and are narrowed to what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ops.corpus import Corpus
from tests.learner.records import random_record


def _fill(corpus: Corpus, names: list[str]) -> None:
    for index, name in enumerate(names):
        record = replace(random_record(index, prompt=3, outputs=4), id=name)
        corpus.append(record, torch.full((6, 5), float(index)))


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    _fill(Corpus(tmp_path), ["a", "b", "c"])
    found = list(Corpus(tmp_path))
    assert [record.id for record, _ in found] == ["a", "b", "c"]
    assert [float(features[0, 0]) for _, features in found] == [0.0, 1.0, 2.0]
    assert found[2][1].shape == (6, 5)


def test_a_torn_tail_is_cut_and_writing_goes_on(tmp_path: Path) -> None:
    _fill(Corpus(tmp_path), ["a", "b"])
    for name in ("traces", "features", "index.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'["torn')
    corpus = Corpus(tmp_path)
    assert corpus.ids == {"a", "b"}
    _fill(corpus, ["c"])
    assert [record.id for record, _ in Corpus(tmp_path)] == ["a", "b", "c"]


def test_only_narrows_what_is_read_and_what_is_named(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    _fill(corpus, ["a", "b"])
    everything = corpus.digest()
    corpus.only = {"b"}
    assert [record.id for record, _ in corpus] == ["b"]
    assert corpus.digest() != everything


def test_a_whole_corpus_is_opened_without_a_write(tmp_path: Path) -> None:
    _fill(Corpus(tmp_path), ["a", "b"])
    files = [tmp_path / name for name in ("traces", "features", "index.jsonl")]
    before = [file.stat().st_mtime_ns for file in files]
    Corpus(tmp_path)
    assert [file.stat().st_mtime_ns for file in files] == before
