"""The picture of a bench: tokens a second by batch size, and what ours gains over our own plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench_ratios import ALL

_INK = "#30363d"
_COLOURS = ("#0b6e99", "#b0572b", "#3a7d44", "#7a4fa3", "#b58900", "#5f6b76", "#c2185b", "#00897b", "#8d6e63")


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the picture of a report; domains are taken together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, ratios = _together(found["rows"]), _over_plain(_together(found["ratios"]))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), dpi=160, width_ratios=(3, 2))
    _speeds(left, rows)
    _gains(right, ratios)
    for axes in (left, right):
        axes.set_xlabel("requests answered together", color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.set_axisbelow(True)
    machine = found["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads", fontsize=9, color=_INK, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _speeds(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for colour, (name, mine) in zip(_cycle(), _grouped(rows, "contender"), strict=False):
        middle = [row["tok_s"] for row in mine]
        reach = [[row["tok_s"] - row["tok_s_min"] for row in mine], [row["tok_s_max"] - row["tok_s"] for row in mine]]
        x = [row["batch"] for row in mine]
        axes.errorbar(
            x, middle, yerr=reach, color=colour, marker="o", markersize=4, capsize=2, linewidth=1.4, label=name
        )
    _batches(axes, rows)
    axes.set_yscale("log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(lambda value, _: f"{value:g}")
    axes.set_title("tokens a second: median, least and most", loc="left", fontsize=10, color=_INK)
    if rows:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _gains(axes: Any, ratios: Sequence[Mapping[str, Any]]) -> None:
    axes.axhline(1.0, color=_INK, linewidth=0.8)
    for colour, (name, mine) in zip(_cycle(), _grouped(ratios, "numerator"), strict=False):
        middle = [ratio["ratio"] for ratio in mine]
        reach = [[max(r["ratio"] - r["low"], 0) for r in mine], [max(r["high"] - r["ratio"], 0) for r in mine]]
        x = [ratio["batch"] for ratio in mine]
        axes.errorbar(
            x, middle, yerr=reach, color=colour, marker="o", markersize=4, capsize=3, linewidth=1.4, label=name
        )
    _batches(axes, ratios)
    axes.set_title("over our own plain decoding, 95 % interval", loc="left", fontsize=10, color=_INK)
    if ratios:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _batches(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    batches = sorted({entry["batch"] for entry in entries})
    if batches:
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()


def _over_plain(ratios: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [ratio for ratio in ratios if ratio["denominator"].startswith("redraft plain")]


def _together(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if entry["domain"] == ALL] or list(entries)


def _grouped(entries: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: entry["batch"]):
        groups.setdefault(entry[key], []).append(entry)
    return list(groups.items())


def _cycle() -> list[str]:
    return list(_COLOURS) * 3
