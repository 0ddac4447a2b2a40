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

_LIVE, _STATIC, _SWAP, _INK = "#0b6e99", "#b0572b", "#3a7d44", "#30363d"
_SHADES = ("#f3f4f6", "#fdf3e1", "#e8f1fb", "#eef7ec", "#f6ecf6")
_LEAST, _MOST = 12, 60  # requests in a moving average
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
    _shade(axes, stretches)
    _mark_swaps(axes, swaps)
    if measurements:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9.5, labelcolor=_INK)
    else:
        axes.text(0.5, 0.5, "no request was measured", transform=axes.transAxes, ha="center", color=_INK)
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=10)
    axes.set_xlabel("tokens served", color=_INK)
    axes.set_ylabel("α (chance that a drafted token is accepted)", color=_INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _lines(
    axes: Any, measurements: Sequence[Measurement], tokens: Sequence[float], stretches: Sequence[Stretch]
) -> list[float]:
    """Draws both drafters in every stretch and returns the levels that must be seen."""
    seen: list[float] = []
    labels = {"static": "static drafter", "live": "live drafter"}
    for stretch in stretches:
        mine = [(m, at) for m, at in zip(measurements, tokens, strict=True) if m.domain in stretch.domains]
        mine = [(m, at) for m, at in mine if m.positions]
        if not mine:
            continue
        x, counts = [at for _, at in mine], [m.positions for m, _ in mine]
        for kind, color, width, dashes in (("static", _STATIC, 1.8, (0, (5, 2))), ("live", _LIVE, 2.4, "-")):
            line = smooth(x, [getattr(m, f"{kind}_sum") for m, _ in mine], counts)
            axes.plot(line.tokens, line.alpha, color=color, lw=width, ls=dashes, label=labels.pop(kind, None), zorder=3)
            axes.fill_between(
                line.tokens, line.alpha - line.half, line.alpha + line.half, color=color, alpha=0.14, lw=0, zorder=2
            )
            seen += [float(line.alpha.min()), float(line.alpha.max())]
    return seen


def _shade(axes: Any, stretches: Sequence[Stretch]) -> None:
    across = axes.get_xaxis_transform()
    for number, stretch in enumerate(stretches):
        axes.axvspan(stretch.start, stretch.end, color=_SHADES[number % len(_SHADES)], lw=0, zorder=0)
        middle = (stretch.start + stretch.end) / 2
        behind = {"boxstyle": "square,pad=0.15", "fc": _SHADES[number % len(_SHADES)], "ec": "none"}
        axes.text(middle, 0.97, stretch.label, transform=across, ha="center", va="top", color=_INK, bbox=behind)
        axes.text(
            middle, 0.905, stretch.note, transform=across, ha="center", va="top", fontsize=9, color=_LIVE, bbox=behind
        )
        if number:
            axes.axvline(stretch.start, color=_INK, lw=1.3, zorder=1)
            axes.text(stretch.start, 0.97, " drift", transform=across, va="top", fontsize=9, style="italic", color=_INK)


def _mark_swaps(axes: Any, swaps: Sequence[Swap]) -> None:
    for number, swap in enumerate(swaps):
        axes.axvline(swap.tokens, color=_SWAP, lw=1.0, ls=(0, (1, 2)), zorder=1)
        axes.annotate(
            f"▲ {swap.label}",
            (swap.tokens, 0.015 + 0.045 * (number % 2)),  # neighbours would overlap on one line
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4, 0),  # the triangle stands on the line
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            color=_SWAP,
        )
