"""The atlas counts each tested draft once in every table, agrees with the counters, and shows what fell and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from learner.buffer import Arrival, Buffer, Measured
from learner.database import Database
from ops import cli
from ops.report_atlas import Atlas, temperature_of
from ops.report_sources import live, recorded
from ops.report_words import CLASSES, class_of
from shared.counters import Counters, field_of
from shared.errors import ConfigError
from shared.models.fingerprint import checkpoint_fingerprint
from shared.store import Store
from shared.trace import Round, Sampling, TraceRecord, encode
from tests.learner.records import random_record
from tests.tiny import build_tiny_model

GREEDY = Sampling(temperature=0.0)


def trace(seed: int, *, domain: str = "sql", sampling: Sampling = GREEDY, target: str = "abc:fp16") -> TraceRecord:
    """Nine tokens: plain, two of three drafts kept, one of one refused, two kept and a bonus, one never reached."""
    record = random_record(seed, sampling=sampling, domain=domain, outputs=9)
    rounds = (
        Round(0, "", (), 0, 0),
        Round(1, "v1", (int(record.output_ids[1]), int(record.output_ids[2]), 58), 2, 3),
        Round(4, "v1", (57,), 0, 1),
        Round(5, "v2", (int(record.output_ids[5]), int(record.output_ids[6])), 2, 2),
        Round(8, "v2", (56, 55), 0, 0),
    )
    said = record.output_ids.copy()
    said[[3, 4]] = (11, 12)  # in the place of 58 and 57
    return replace(record, rounds=rounds, output_ids=said, target=target)


def atlas_of(*records: TraceRecord) -> Atlas:
    atlas = Atlas()
    for record in records:
        atlas.add(record, lambda ids: " ".join(map(str, ids)), lambda token: "name" if token == 11 else "word")
    return atlas


def test_each_tested_draft_is_counted_once_in_every_table() -> None:
    atlas = atlas_of(trace(1), trace(2, domain="chat", sampling=Sampling(temperature=0.5, seeded=True)))
    assert (atlas.total.accepted, atlas.total.tested) == (8, 12)
    for table in (
        atlas.by_position, atlas.by_class, atlas.by_domain, atlas.by_temperature, atlas.by_version,
        atlas.class_by_domain,
    ):  # fmt: skip
        assert sum(tally.accepted for tally in table.values()) == 8
        assert sum(tally.tested for tally in table.values()) == 12
    # Depth 1 of three rounds, depth 2 of two of them, depth 3 of one; the last round was never reached.
    assert [(atlas.by_position[n].accepted, atlas.by_position[n].tested) for n in (1, 2, 3)] == [(4, 6), (4, 4), (0, 2)]
    assert (atlas.rounds, atlas.drafted, atlas.requests, atlas.tokens) == (8, 16, 2, 18)
    assert set(atlas.by_temperature) == {"0 (greedy)", "up to 0.7, seeded"}
    assert (atlas.by_class["name"].accepted, atlas.by_class["name"].tested) == (0, 2)
    assert sorted(atlas.by_version) == ["v1", "v2"]


def test_a_rejection_names_the_draft_what_was_said_and_where() -> None:
    record = trace(1)
    most = atlas_of(record, record).most_rejected(5)
    assert {found.draft: (found.count, dict(found.instead)) for found in most} == {
        58: (2, {11: 2}), 57: (2, {12: 2}),
    }  # fmt: skip
    before = [*record.prompt_ids.tolist(), *record.output_ids[:3].tolist()]
    assert next(found for found in most if found.draft == 58).contexts[0] == " ".join(map(str, before))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "function word"), (" und", "function word"), (" Berlin", "name"), ("42", "number"), (" 3rd", "number"),
        (" house", "word"), ("ing", "word piece"), (",", "punctuation"), (" —", "punctuation"), ("\n\n", "space"),
        ("()", "code"), (" user_id", "code"), ("getName", "code"), (" ==", "code"),
    ],
)  # fmt: skip
def test_words_have_their_class(text: str, kind: str) -> None:
    assert class_of(text) == kind
    assert kind in CLASSES
    assert class_of(text, special=True) == "special"


def test_temperatures_fall_into_bands() -> None:
    bands = [temperature_of(Sampling(temperature=value)) for value in (0.0, 0.3, 0.31, 1.0, 1.5)]
    assert bands == ["0 (greedy)", "up to 0.3", "up to 0.7", "up to 1", "above 1"]


def measured(record: TraceRecord) -> Measured:
    accepted, tested = (sum(getattr(r, name) for r in record.rounds) for name in ("accepted", "tested"))
    return Measured("v1", 3, 8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, accepted, tested)


def buffer_of(file: Path, records: list[TraceRecord], recent: int = 100) -> None:
    database = Database(file)
    buffer = Buffer(database, recent=recent, reservoir=0)
    buffer.add([Arrival(f"{n}-0", encode(r), r, None, measured(r)) for n, r in enumerate(records)])
    database.close()


def test_a_buffer_says_what_it_has_not_kept(tmp_path: Path) -> None:
    records = [trace(n) for n in range(12)]
    buffer_of(tmp_path / "all.sqlite", records)
    source = recorded(tmp_path / "all.sqlite", "abc:int8")  # of one target, whatever the weight format
    atlas = atlas_of(*source.traces)
    assert (atlas.total.accepted, atlas.total.tested) == (source.accepted, source.tested) == (12 * 4, 12 * 6)
    assert source.missing == []
    buffer_of(tmp_path / "few.sqlite", records, recent=2)
    few = recorded(tmp_path / "few.sqlite", "abc:fp16")
    assert len(few.traces) < 12
    assert few.tested == 72
    assert few.missing == [
        f"{12 - len(few.traces)} requests are only in the ledger: the buffer keeps the newest and a sample"
    ]
    other = recorded(tmp_path / "all.sqlite", "another:fp16")
    assert (other.traces, other.missing) == ([], ["12 traces are of another target"])
    with pytest.raises(ConfigError, match="--buffer"):
        recorded(tmp_path / "absent.sqlite", "abc")


def test_the_live_stream_is_read_without_taking_anything(redis_url: str) -> None:
    store = Store(redis_url, f"test-{uuid4().hex}")
    records = [trace(n) for n in range(70)]  # more than one page
    for record in records:
        store.append_trace(encode(record), max_bytes=10**7)
    counters = Counters()
    for record in records:
        counters.add("accepted", 4, domain=record.domain, version="v1")
        counters.add("tested", 6, domain=record.domain, version="v1")
    store.put_counters("r", "e", counters.fields | {"traces_published": 71, field_of("traces_dropped"): 2})
    source = live(store, "abc:fp16")
    atlas = atlas_of(*source.traces)
    assert (atlas.total.accepted, atlas.total.tested) == (source.accepted, source.tested) == (280, 420)
    assert source.missing == ["2 traces were dropped by replicas", "1 traces were trimmed from the stream"]
    assert store.stream_depth().lag == 70  # still there for the learner
    store.close()


def test_the_command_writes_a_page_that_stands_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_tiny_model(tmp_path / "target")
    target = checkpoint_fingerprint(folder, tmp_path / "home", "target")
    buffer_of(tmp_path / "b.sqlite", [trace(n, target=f"{target}:fp16", domain="<sql>") for n in range(3)])
    words = [
        "report",
        "--target",
        str(folder),
        "--set",
        f"home={tmp_path / 'home'}",
        "--buffer",
        str(tmp_path / "b.sqlite"),
    ]
    out, counts = tmp_path / "atlas.html", tmp_path / "atlas.json"
    assert cli.run([*words, "--out", str(out), "--json", str(counts)]) == 0
    assert "12 of 18 in these traces, 12 of 18 counted: they agree" in capsys.readouterr().out
    html = out.read_text(encoding="utf-8")
    assert "&lt;sql&gt;" in html
    assert "<sql>" not in html
    assert "data:image/png;base64," in html
    assert "http" not in html
    assert (tmp_path / "atlas.png").read_bytes().startswith(b"\x89PNG")
    tree = json.loads(counts.read_text())
    assert tree["total"] == {"accepted": 12, "tested": 18}
    assert [entry["rejected"] for entry in tree["most_rejected"]] == [3, 3]
    buffer_of(
        tmp_path / "none.sqlite", [replace(trace(1), rounds=(), target=f"{target}:fp16", kinds=np.zeros(9, np.uint8))]
    )
    assert cli.run([*words[:-1], str(tmp_path / "none.sqlite"), "--out", str(out)]) == 1
    assert "no tested drafts" in capsys.readouterr().err
