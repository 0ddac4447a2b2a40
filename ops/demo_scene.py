"""What the live view shows at one moment, as numbers: the curve's columns, recent rates, α by domain.

Pure functions from a `Board` and the progress of the traffic; nothing here knows of terminals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ops.demo_alpha import Measurement, ratio
from ops.demo_watch import Board

RECENT_S = 30.0
_SMOOTH = 2  # columns to either side that a point of the curve averages


@dataclass(frozen=True)
class Scene:
    """Times in seconds since the epoch, spans in seconds."""

    board: Board
    started_at: float
    now: float
    seconds: float  # planned for the traffic
    phase: str
    phases: Sequence[tuple[str, float]]  # name, share of the time
    first_sent: Mapping[str, float]  # of the drifted domains
    answered: int
    failed: int
    users: int
    model: str
    learning: bool
    urls: Mapping[str, str]

    @property
    def elapsed(self) -> float:
        return max(self.now - self.started_at, 0.0)


@dataclass(frozen=True)
class DomainRow:
    domain: str
    requests: int  # measured
    counted: float | None  # α of the last seconds, from the replicas' counters
    live: float | None  # over the last measured requests
    static: float | None
    active: bool  # has traffic now


def rates(scene: Scene) -> tuple[float | None, float | None]:
    """Tokens a second and tokens drafted a step, over the last seconds."""
    windows = [w for w in scene.board.windows if w.end > scene.now - RECENT_S]
    if not windows:
        return None, None
    counts = [counts for window in windows for counts in window.domains.values()]
    tokens = sum(window.emitted for window in windows) / sum(w.end - w.start for w in windows)
    return tokens, ratio(sum(c.drafted for c in counts), sum(c.steps for c in counts))


def domain_rows(scene: Scene, *, last: int = 30) -> list[DomainRow]:
    """In order of first traffic. Live and static are over the same `last` measured requests of the domain."""
    windows = scene.board.windows
    names = dict.fromkeys(domain for window in windows for domain in window.domains)
    rows = []
    for domain in names:
        counts = [w.domains[domain] for w in windows if w.end > scene.now - RECENT_S and domain in w.domains]
        everything = [m for m in scene.board.measurements if m.domain == domain]
        newest = everything[-last:]
        positions = sum(m.positions for m in newest)
        rows.append(
            DomainRow(
                domain,
                len(everything),
                ratio(sum(c.accepted for c in counts), sum(c.tested for c in counts)),
                ratio(sum(m.live_sum for m in newest), positions),
                ratio(sum(m.static_sum for m in newest), positions),
                bool(counts),
            )
        )
    return rows


def column_of(scene: Scene, at: float, columns: int) -> int:
    """Of a time, where the planned time fills all columns (a longer one is squeezed in)."""
    span = max(scene.seconds, scene.elapsed, 1e-9)
    return min(max(int((at - scene.started_at) / span * columns), 0), columns - 1)


def curves(scene: Scene, columns: int) -> tuple[list[float | None], list[float | None]]:
    """Live and static α for each column; an average never reaches across a drift."""
    sums = [[0.0, 0.0, 0.0] for _ in range(columns)]
    for m in scene.board.measurements:
        cell = sums[column_of(scene, m.finished_at, columns)]
        for i, value in enumerate((m.live_sum, m.static_sum, float(m.positions))):
            cell[i] += value
    edges = sorted({0, columns, *(column_of(scene, at, columns) for at in scene.first_sent.values())})
    live: list[float | None] = []
    static: list[float | None] = []
    for start, end in pairwise(edges):
        filled = [c for c in range(start, end) if sums[c][2]]
        for column in range(start, end):
            inside = bool(filled) and filled[0] <= column <= filled[-1]
            near = sums[max(start, column - _SMOOTH) : min(end, column + _SMOOTH + 1)]
            positions = sum(cell[2] for cell in near) if inside else 0.0
            live.append(ratio(sum(cell[0] for cell in near), positions))
            static.append(ratio(sum(cell[1] for cell in near), positions))
    return live, static


def newest(measurements: Sequence[Measurement]) -> float:
    """Finish time of the newest measured request; 0 without one."""
    return max((m.finished_at for m in measurements), default=0.0)
