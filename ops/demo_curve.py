"""Curves in text: braille dots (2 x 4 to a character), a scale at the left, and marks as dotted verticals.

Points in, rich Text out. A gap is None; points are joined where neighbours exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bit of a dot by column and row of its character
_SCALE = 5  # characters of the scale


@dataclass(frozen=True)
class Line:
    points: Sequence[float | None]  # one for each column of dots
    style: str


@dataclass(frozen=True)
class Mark:
    column: int  # of dots
    label: str
    style: str


def columns_of(width: int) -> int:
    """Dot columns of a curve that is `width` characters wide."""
    return max(2 * (width - _SCALE), 2)


def curve(lines: Sequence[Line], marks: Sequence[Mark], *, width: int, height: int) -> Text:
    """`height` rows of text, the first for the marks' labels; later lines are drawn over earlier ones."""
    rows = max(height - 1, 1)
    low, high = _range(lines)
    canvas = _Canvas(width - _SCALE, rows)
    for line in lines:
        canvas.draw([None if p is None else (p - low) / (high - low) for p in line.points], line.style)
    text = Text(no_wrap=True)
    text.append(" " * _SCALE)
    text.append(_labels(marks, width - _SCALE))
    verticals = {mark.column // 2: mark.style for mark in marks}
    labelled = {row: high - (high - low) * row / max(rows - 1, 1) for row in {0, (rows - 1) // 2, rows - 1}}
    for row in range(rows):
        text.append("\n")
        text.append(f"{labelled[row]:4.2f}┤" if row in labelled else f"{'│':>{_SCALE}}", "dim")
        for column in range(width - _SCALE):
            character, style = canvas.cell(column, row)
            if character is None and column in verticals:
                character, style = "┊", verticals[column]
            text.append(character or " ", style)
    return text


def _range(lines: Sequence[Line]) -> tuple[float, float]:
    """Tenths around the data, so that the scale does not move with every point."""
    known = [point for line in lines for point in line.points if point is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low, high = int(low * 10) / 10, int(high * 10 + 1) / 10
    return low, max(high, low + 0.1)


def _labels(marks: Sequence[Mark], width: int) -> Text:
    """Those that fit, each from its own column on; earlier ones in `marks` come first."""
    line, taken = Text(" " * width), [False] * (width + 1)
    for mark in marks:
        start = max(min(mark.column // 2, width - len(mark.label)), 0)
        end = start + len(mark.label)
        if any(taken[max(start - 1, 0) : end + 1]):
            continue
        taken[start:end] = [True] * len(mark.label)
        line = Text.assemble(line[:start], (mark.label, mark.style), line[end:])
    return line


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._cells: dict[tuple[int, int], tuple[int, str]] = {}

    def draw(self, levels: Sequence[float | None], style: str) -> None:  # 0..1, or a gap
        before: int | None = None
        for x, level in enumerate(levels[: 2 * self._width]):
            if level is None:
                before = None
                continue
            y = round((1 - level) * (4 * self._height - 1))
            # A steep step is a vertical stroke, so that the line stays one line.
            for dot in _between(before, y):
                self._dot(x, dot, style)
            before = y

    def cell(self, column: int, row: int) -> tuple[str | None, str]:
        bits, style = self._cells.get((column, row), (0, ""))
        return (chr(0x2800 + bits) if bits else None), style

    def _dot(self, x: int, y: int, style: str) -> None:
        place = x // 2, y // 4
        bits, owner = self._cells.get(place, (0, style))
        if owner != style:
            bits = 0  # the later line takes the character
        self._cells[place] = bits | _DOTS[x % 2][y % 4], style


def _between(before: int | None, y: int) -> range:
    if before is None or before == y:
        return range(y, y + 1)
    return range(before + 1, y + 1) if before < y else range(y, before)
