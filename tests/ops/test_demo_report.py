"""The JSON has the keys that others rely on, its figures are those of the arithmetic, and the picture gets written."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ops.demo_files import about, notes_of, require_writable, stretches_of, write_json, write_picture
from ops.demo_picture import Stretch, Swap, draw
from ops.demo_report import Run, report
from ops.demo_summary import summary
from ops.demo_watch import Board
from shared.counters import Counters
from shared.errors import ConfigError
from tests.ops.demo_fakes import START, synthetic_run

PROMISED = {
    "windows",
    "promotions",
    "domains",
    "alpha_live_last_third",
    "alpha_static_last_third",
    "alpha_gain_ci95",
    "tokens_per_second",
    "swap_pause_seconds",
    "traces_dropped",
}
A_WINDOW = {"t", "tokens", "domain", "accepted", "tested", "alpha", "version", "tokens_per_second", "gamma"}


@pytest.fixture(scope="module")
def run() -> Run:
    return synthetic_run()


def _said(run: Run) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(summary(report(run)))
    return console.export_text()


def test_the_promised_keys(run: Run, tmp_path: Path) -> None:
    write_json(tmp_path / "demo.json", report(run))
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found.keys() >= PROMISED
    assert found["windows"][0].keys() >= A_WINDOW | {"static_sum", "live_sum", "positions"}
    assert found["promotions"][0].keys() == {"version", "tokens", "seconds", "reason"}
    low, high = found["alpha_gain_ci95"]
    assert 0 < low < high
    assert found["run"]["command"] == "redraft demo"


def test_the_figures(run: Run) -> None:
    found = report(run)
    thirds = found["last_third"]
    # 240 s of each drifted domain at one request a second: 80 in its last third.
    assert {domain: third["requests"] for domain, third in thirds.items()} == {"sql": 80, "german": 80}
    live, static = found["alpha_live_last_third"], found["alpha_static_last_third"]
    assert live["domains"]["sql"] == pytest.approx(thirds["sql"]["live_sum"] / thirds["sql"]["positions"])
    assert static["overall"] == pytest.approx(
        sum(third["static_sum"] for third in thirds.values()) / sum(third["positions"] for third in thirds.values())
    )
    # Two thirds of 240 s after a drift the synthetic gain is 0.25 (1 - exp(-160 / 72)) = 0.223, and grows to 0.241.
    for low, high in found["alpha_gain_ci95_by_domain"].values():
        assert 0.223 < low < high < 0.241
    # 100 tokens a second for 600 s.
    assert found["tokens_per_second"] == pytest.approx(100)
    assert [drift["tokens"] for drift in found["drifts"]] == [12_000, 36_000]
    assert found["promotions"][0] == {
        "version": "v1",
        "tokens": 18_000,
        "seconds": 180.0,
        "reason": run.board.promotions[0].reason,
    }


def test_window_counts_add_up_to_the_domains_counts(run: Run) -> None:
    found = report(run)
    measured = sum(entry["positions"] for entry in found["windows"] if entry["domain"] == "german")
    assert measured == found["domains"]["german"]["positions"]


def test_swaps_are_counted_and_their_pause_is_the_mean_of_one(run: Run) -> None:
    counters = Counters({"swaps": 4.0, "swap_pause_s": 0.02, "traces_dropped": 3.0})
    found = report(replace(run, board=replace(run.board, counters=counters)))
    assert found["swap_pause_seconds"] == 0.005
    assert found["traces_dropped"] == 3
    assert report(run)["swap_pause_seconds"] is None


def test_what_was_not_measured_is_counted_and_said(run: Run) -> None:
    short = replace(run, board=replace(run.board, measurements=run.board.measurements[:-100]))
    found = report(short)["requests"]
    assert found["unmeasured"] == 100
    assert "100 were not" in _said(short)
    assert "were not" not in _said(run)


def test_the_summary_states_the_claim(run: Run) -> None:
    said = _said(run)
    assert "together" in said
    for word in ("sql", "german", "5 promoted", "tokens/s", "as estimated from the traces"):
        assert word in said


def test_a_run_that_was_stopped_early_still_has_a_report_and_a_picture(run: Run, tmp_path: Path) -> None:
    early = replace(run, board=Board(), answers=run.answers[:3], first_sent={}, ended_at=START + 9)
    found = report(early)
    assert found["alpha_gain_ci95"] is None
    assert found["alpha_live_last_third"]["overall"] is None
    assert "nothing measured" in _said(early)
    write_picture(tmp_path / "alpha.png", early, found, "m")
    assert (tmp_path / "alpha.png").read_bytes().startswith(b"\x89PNG")


def _cut_short(run: Run) -> Run:
    """Before a version was promoted."""
    untaught = tuple(replace(m, version="base", live_sum=m.static_sum) for m in run.board.measurements)
    return replace(run, board=replace(run.board, measurements=untaught, promotions=(), learner={"attempts": 1}))


def test_a_run_too_short_to_learn_says_so_instead_of_a_gain_of_nothing(run: Run) -> None:
    short = _cut_short(run)
    found = report(short)
    assert found["unlearnt"] == ["sql", "german"]
    assert "too short to show learning in sql, german" in " ".join(_said(short).split())
    assert "+0.0" not in _said(short).split("requests, ")[0]
    assert notes_of(found) == dict.fromkeys(["sql", "german"], "too short to show learning")
    # The control teaches nothing on purpose: there, no gain is the finding.
    assert report(replace(short, learning=False))["unlearnt"] == []
    assert report(run)["unlearnt"] == []
    assert "too short" not in _said(run)


def test_no_label_of_the_picture_covers_another(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches and swaps so close that their labels cannot stand side by side."""
    from matplotlib import pyplot

    boxes: list[Any] = []

    def look(figure: Any) -> None:
        renderer, axes = figure.canvas.get_renderer(), figure.axes[0]
        frame = axes.get_window_extent(renderer).padded(1)
        for text in axes.texts:
            boxes.append(text.get_window_extent(renderer))
            assert frame.fully_contains(boxes[-1].x0, boxes[-1].y0), text
            assert frame.fully_contains(boxes[-1].x1, boxes[-1].y1), text

    monkeypatch.setattr(pyplot, "close", look)
    stretches = [
        Stretch("chat · code", frozenset(["chat"]), 0, 3e4),
        Stretch("sql", frozenset(["sql"]), 3e4, 3.1e4, "x" * 28),
    ]
    stretches.append(Stretch("german", frozenset(["german"]), 3.1e4, 3.2e4, "y" * 28))
    draw(tmp_path / "a.png", (), (), stretches, [Swap(f"v{n}", 3.1e4 + 100 * n) for n in range(5)], "close")
    assert len(boxes) == 3 + 2 + 2 + 5 + 1  # domains, notes, drifts, swaps, and that nothing was measured
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def test_traffic_that_never_drifts_is_judged_in_every_domain(run: Run) -> None:
    warm = [answer for answer in run.answers if answer.domain in ("chat", "code", "maths")]
    found = report(replace(run, answers=warm, drifted=(), first_sent={}))
    assert set(found["last_third"]) == {"chat", "code", "maths"}


def test_the_picture(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "alpha.png"
    write_picture(file, run, report(run), "SmolLM2-135M-Instruct")
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") >= 1200  # pixels across: sharp at the README's width
    assert len(data) > 30_000  # an empty frame is smaller


def test_stretches_lie_between_the_drifts(run: Run) -> None:
    stretches = stretches_of(run, {"sql": "good"})
    assert [(s.label, s.start, s.end, s.note) for s in stretches] == [
        ("chat · code · maths", 0, 12_000, ""),
        ("sql", 12_000, 36_000, "good"),
        ("german", 36_000, 60_000, ""),
    ]


def test_a_result_that_could_not_be_kept_is_refused_beforehand(tmp_path: Path) -> None:
    require_writable("--json", None)
    require_writable("--json", tmp_path / "new.json")
    for bad in (tmp_path / "no" / "new.json", tmp_path):
        with pytest.raises(ConfigError, match="--json"):
            require_writable("--json", bad)


def test_the_file_says_how_it_came_about() -> None:
    found = about({"home": "h"})
    assert found["settings"] == {"home": "h"}
    assert found["machine"]["cores"] >= 1
    assert {"command", "commit", "versions"} <= found.keys()
