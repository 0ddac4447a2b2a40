"""The view fits its terminal, shows what it must, and never averages across a drift."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from ops.demo_curve import Line, Mark, columns_of, curve
from ops.demo_scene import Scene, curves, domain_rows, rates
from ops.demo_view import plain, render
from ops.demo_watch import Board
from tests.ops.demo_fakes import START, synthetic_run


def _scene(at: float = 430, **changes: object) -> Scene:
    run = synthetic_run()
    board = replace(
        run.board,
        windows=tuple(w for w in run.board.windows if w.end <= START + at),
        measurements=tuple(m for m in run.board.measurements if m.finished_at <= START + at),
        promotions=tuple(p for p in run.board.promotions if p.at <= START + at),
    )
    scene = Scene(
        board=board,
        started_at=START,
        now=START + at,
        seconds=600,
        phase="german",
        phases=[("warm-up", 0.2), ("sql", 0.4), ("german", 0.4)],
        first_sent=run.first_sent,
        answered=430,
        failed=0,
        users=8,
        model="smollm2",
        learning=True,
        urls={"API": "http://127.0.0.1:8000/v1"},
    )
    return replace(scene, **changes)  # type: ignore[arg-type]


def _drawn(scene: Scene, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, record=True, file=StringIO())
    console.print(render(scene, width, height), height=height)
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (200, 60)])
def test_it_fits(width: int, height: int) -> None:
    lines = _drawn(_scene(), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_it_shows_what_one_looks_for() -> None:
    text = "\n".join(_drawn(_scene(), 100, 30))
    for words in ("german", "tokens/s", "gamma", "v5", "training", "promoted: alpha", "to do", "▲3", "07:10 / 10:00"):
        assert words in text
    assert "control" not in text
    assert "control" in "\n".join(_drawn(_scene(learning=False), 100, 30))


def test_it_can_be_drawn_before_anything_is_known() -> None:
    empty = _scene(board=Board(), first_sent={}, answered=0, now=START)
    assert "no attempt has been judged yet" in "\n".join(_drawn(empty, 100, 30))
    assert "tokens/s" in plain(empty)


def test_the_line_for_pipes_is_one_line_with_the_active_domain() -> None:
    line = plain(_scene())
    assert "\n" not in line
    assert "german α" in line
    assert "sql α" not in line


def test_a_curve_breaks_at_a_drift() -> None:
    columns = 120
    live, static = curves(_scene(at=600), columns)
    drift = int(0.2 * columns)
    # Synthetic levels: 0.52 to 0.66 in warm-up, SQL starts at 0.38 without any gain yet.
    assert min(level for level in live[:drift] if level is not None) > 0.5
    assert (live[drift] or 1) < 0.45
    assert max(level for level in static[drift : int(0.6 * columns)] if level is not None) < 0.45


def test_columns_that_nobody_reached_are_gaps() -> None:
    live, _ = curves(_scene(at=300), 120)
    assert live[-1] is None
    assert live[50] is not None


def test_rates_are_of_the_last_seconds() -> None:
    assert list(rates(_scene())) == pytest.approx([100, 2])  # as the synthetic windows have it
    assert rates(_scene(board=Board())) == (None, None)


def test_domains_keep_the_order_of_their_traffic() -> None:
    rows = domain_rows(_scene())
    assert {row.domain for row in rows[:3]} == {"chat", "code", "maths"}
    assert [row.domain for row in rows[3:]] == ["sql", "german"]
    assert [row.active for row in rows] == [False] * 4 + [True]


def test_a_curve_has_its_size_and_its_marks() -> None:
    columns = columns_of(40)
    text = curve([Line([0.5] * columns, "cyan")], [Mark(10, "sql", "white")], width=40, height=8).plain.split("\n")
    assert len(text) == 8
    assert max(map(len, text)) <= 40
    assert text[0].index("sql") == 5 + 10 // 2  # the scale, and two dots to a character
    assert any("┊" in line for line in text)


def test_marks_that_would_overlap_lose_their_label_only() -> None:
    marks = [Mark(10, "first", "white"), Mark(12, "second", "white")]
    text = curve([], marks, width=40, height=8).plain
    assert "first" in text
    assert "second" not in text
    assert text.split("\n")[2].count("┊") == 2
