"""`experiment.png`: α over records, the online drafter beside the offline ones, and its variants below.

Lines are moving averages within one domain, never across a boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ops.demo_picture import INK, Stretch, Swap, mark_swaps, part, shade, smooth
from ops.experiment_arms import ONLINE, STATIC
from ops.experiment_result import ArmResult
from ops.experiment_traffic import Traffic

_LOOKS: dict[str, tuple[str, float, Any]] = {  # colour, width, dashes
    STATIC: ("#b0572b", 1.8, (0, (5, 2))),
    "offline-30": ("#b9bec6", 1.2, "-"),
    "offline-50": ("#949ba6", 1.2, "-"),
    "offline-70": ("#6b7380", 1.2, "-"),
    "offline-100": ("#30363d", 1.6, "-"),
    ONLINE: ("#0b6e99", 2.4, "-"),
    "online-full": ("#8250df", 1.6, "-"),
    "online-no-gate": ("#bf8700", 1.6, "-"),
    "online-no-replay": ("#3a7d44", 1.6, (0, (4, 1))),
}


def draw(path: Path, traffic: Traffic, results: Mapping[str, ArmResult], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = [name for name in results if name.startswith(f"{ONLINE}-")]
    panels = [[name for name in results if name not in variants]]
    if variants:
        panels.append([STATIC, *(name for name in results if name.startswith(ONLINE))])
    figure, rows = pyplot.subplots(len(panels), 1, figsize=(10, 4.2 * len(panels)), dpi=160, squeeze=False)
    stretches, above, below = _stretches(traffic), list[list[Any]](), list[Any]()
    for axes, names in zip(rows[:, 0], panels, strict=True):
        seen = [level for name in names for level in _line(axes, results[name], stretches)]
        room = max(max(seen) - min(seen), 0.1)
        axes.set_ylim(max(0.0, min(seen) - 0.2 * room), max(seen) + 0.3 * room)
        axes.set_xlim(0, stretches[-1].end)
        above.append(shade(axes, stretches))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, labelcolor=INK)
        axes.set_ylabel("α", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.set_axisbelow(True)
    if ONLINE in results:
        served = [Swap(version.name, version.record) for version in results[ONLINE].versions[1:]]
        below = mark_swaps(rows[0, 0], served)
    rows[0, 0].set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    rows[-1, 0].set_xlabel("records", color=INK)
    for label in chain(below, *above):
        label.set_in_layout(False)  # they make room for each other, not the frame for them
    figure.tight_layout()
    for axes, labels in zip(rows[:, 0], above, strict=True):
        part(axes, labels, -1)
    part(rows[0, 0], below, 1)
    figure.savefig(path)
    pyplot.close(figure)


def _stretches(traffic: Traffic) -> list[Stretch]:
    found, start = list[Stretch](), 0
    for domain in traffic.domains:
        found.append(Stretch(domain.name, frozenset([domain.name]), start, start + len(domain.stream)))
        start += len(domain.stream)
    return found


def _line(axes: Any, result: ArmResult, stretches: Sequence[Stretch]) -> list[float]:
    """Draws one arm and returns its levels."""
    colour, width, dashes = _LOOKS[result.arm]
    label, seen = result.arm, list[float]()
    for stretch in stretches:
        start, end = int(stretch.start), int(stretch.end)
        mine = [(i, judged) for i, judged in enumerate(result.judged[start:end], start=start) if judged.positions]
        if not mine:
            continue
        line = smooth([i + 0.5 for i, _ in mine], [j.first for _, j in mine], [j.positions for _, j in mine])
        axes.plot(line.tokens, line.alpha, color=colour, lw=width, ls=dashes, label=label, zorder=3)
        if result.arm == ONLINE:
            low, high = line.alpha - line.half, line.alpha + line.half
            axes.fill_between(line.tokens, low, high, color=colour, alpha=0.14, lw=0, zorder=2)
        label = ""
        seen += [float(line.alpha.min()), float(line.alpha.max())]
    return seen
