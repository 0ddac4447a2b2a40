"""`alpha.png`: α over tokens served, the live drafter beside the static one, with drifts and swaps marked.

Both lines come from the same requests, each at the token count of its end. They are moving averages within one
stretch of traffic (never across a drift, which would bend the fall into a slope), in light 95 % bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.demo_alpha import Measurement

_LIVE, _STATIC, _SWAP, INK = "#0b6e99", "#b0572b", "#3a7d44", "#30363d"
_SHADES = ("#f3f4f6", "#fdf3e1", "#e8f1fb", "#eef7ec", "#f6ecf6")
_LEAST, _MOST = 12, 60  # requests in a moving average
_APART = 2  # pixels between labels
_SHARE = 5  # of a stretch: a moving average covers one part in this many


@dataclass(frozen=True)
class Stretch:
    """Traffic between two drifts."""

    label: str
    domains: frozenset[str]
    start: float  # tokens served
    end: float
    note: str = ""  # what it came to, below the label


@dataclass(frozen=True)
class Swap:
    label: str
    tokens: float


@dataclass(frozen=True)
class Smooth:
    """A moving average over requests, with half the width of its 95 % interval."""

    tokens: NDArray[np.float64]  # [n]
    alpha: NDArray[np.float64]  # [n]
    half: NDArray[np.float64]  # [n]


def smooth(tokens: Sequence[float], sums: Sequence[float], positions: Sequence[int]) -> Smooth:
    """Of α = sum / positions over neighbouring requests; the interval is the ratio estimator's, by request."""
    n = len(tokens)
    order = np.argsort(np.asarray(tokens), kind="stable")
    x, s, c = (np.asarray(values, dtype=np.float64)[order] for values in (tokens, sums, positions))
    half_window = min(max(n // _SHARE, _LEAST), _MOST) // 2
    alpha, half = np.zeros(n), np.zeros(n)
    for i in range(n):
        # As many on both sides and fewer towards the ends, since a lopsided window shifts the line; but never too few.
        reach = max(min(half_window, i, n - 1 - i), (half_window + 1) // 2)
        mine = slice(max(i - reach, 0), i + reach + 1)
        total = c[mine].sum()
        alpha[i] = s[mine].sum() / total
        half[i] = 1.96 * np.sqrt(((s[mine] - alpha[i] * c[mine]) ** 2).sum()) / total
    return Smooth(x, alpha, half)


def draw(
    path: Path,
    measurements: Sequence[Measurement],
    tokens: Sequence[float],  # served when each measured request ended
    stretches: Sequence[Stretch],
    swaps: Sequence[Swap],
    title: str,
) -> None:
    """Writes the picture; without measurements it is an empty frame that says so."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.6), dpi=160)
    shown = _lines(axes, measurements, tokens, stretches)
    lowest, highest = min(shown, default=0.1), max(shown, default=0.7)
    room = max(highest - lowest, 0.1)  # labels stand above the lines, swaps below
    axes.set_ylim(max(0.0, lowest - 0.2 * room), highest + 0.35 * room)
    axes.set_xlim(0, max([stretch.end for stretch in stretches], default=1.0) or 1.0)
    above = shade(axes, stretches)
    below = mark_swaps(axes, swaps)
    if measurements:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9.5, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no request was measured", transform=axes.transAxes, ha="center", color=INK)
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    axes.set_xlabel("tokens served", color=INK)
    axes.set_ylabel("α (chance that a drafted token is accepted)", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    for label in (*above, *below):
        label.set_in_layout(False)  # they make room for each other, not the frame for them
    figure.tight_layout()
    part(axes, above, -1)
    part(axes, below, 1)
    figure.savefig(path)
    pyplot.close(figure)


def _lines(
    axes: Any, measurements: Sequence[Measurement], tokens: Sequence[float], stretches: Sequence[Stretch]
) -> list[float]:
    """Draws both drafters in every stretch and returns the levels that must be seen."""
    seen: list[float] = []
    labels = {"live": "live drafter", "static": "static drafter"}
    for stretch in stretches:
        mine = [(m, at) for m, at in zip(measurements, tokens, strict=True) if m.domain in stretch.domains]
        mine = [(m, at) for m, at in mine if m.positions]
        if not mine:
            continue
        x, counts = [at for _, at in mine], [m.positions for m, _ in mine]
        # Live first: dashes on a line show that both are the same, a line on dashes hides one of them.
        for kind, color, width, dashes in (("live", _LIVE, 2.4, "-"), ("static", _STATIC, 1.8, (0, (5, 2)))):
            line = smooth(x, [getattr(m, f"{kind}_sum") for m, _ in mine], counts)
            axes.plot(line.tokens, line.alpha, color=color, lw=width, ls=dashes, label=labels.pop(kind, None), zorder=3)
            axes.fill_between(
                line.tokens, line.alpha - line.half, line.alpha + line.half, color=color, alpha=0.14, lw=0, zorder=2
            )
            seen += [float(line.alpha.min()), float(line.alpha.max())]
    return seen


def shade(axes: Any, stretches: Sequence[Stretch]) -> list[Any]:
    """The labels, from left to right."""
    across = axes.get_xaxis_transform()
    labels = []
    for number, stretch in enumerate(stretches):
        shade = _SHADES[number % len(_SHADES)]
        axes.axvspan(stretch.start, stretch.end, color=shade, lw=0, zorder=0)
        middle = (stretch.start + stretch.end) / 2
        behind = {"boxstyle": "square,pad=0.15", "fc": shade, "ec": "none"}
        labels.append(
            axes.text(middle, 0.97, stretch.label, transform=across, ha="center", va="top", color=INK, bbox=behind)
        )
        if stretch.note:
            small = {"fontsize": 9, "color": _LIVE, "bbox": behind}
            labels.append(axes.text(middle, 0.97, stretch.note, transform=across, ha="center", va="top", **small))
        if number:
            axes.axvline(stretch.start, color=INK, lw=1.3, zorder=1)
            small = {"fontsize": 9, "style": "italic", "color": INK}
            labels.append(axes.text(stretch.start, 0.97, " drift", transform=across, va="top", **small))
    return labels


def mark_swaps(axes: Any, swaps: Sequence[Swap]) -> list[Any]:
    """The labels, from left to right."""
    from matplotlib.transforms import ScaledTranslation

    on_the_line = ScaledTranslation(-4 / 72, 0, axes.figure.dpi_scale_trans)  # where the triangle's tip is
    labels = []
    for swap in swaps:
        axes.axvline(swap.tokens, color=_SWAP, lw=1.0, ls=(0, (1, 2)), zorder=1)
        place = axes.get_xaxis_transform() + on_the_line
        labels.append(
            axes.text(swap.tokens, 0.015, f"▲ {swap.label}", transform=place, va="bottom", fontsize=8, color=_SWAP)
        )
    return labels


def part(axes: Any, labels: Sequence[Any], direction: int) -> None:
    """Moves each label up (1) or down (-1) until it covers none before it, and into the frame where it sticks out."""
    from matplotlib.transforms import Affine2D

    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    placed: list[Any] = []
    for label in labels:
        box = label.get_window_extent(renderer)
        right, up = max(frame.x0 - box.x0, 0) - max(box.x1 - frame.x1, 0), 0.0
        while any(box.translated(right, up).padded(_APART).overlaps(other) for other in placed):
            up += direction
        placed.append(box.translated(right, up))
        label.set_transform(label.get_transform() + Affine2D().translate(right, up))
