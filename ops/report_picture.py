"""The atlas as one picture: α by position, class of token, domain and temperature, and how much was tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from ops.report_atlas import Atlas, Tally

_BAR, _INK = "#0b6e99", "#30363d"
_MOST = 12  # bars in a panel


def picture(atlas: Atlas, title: str) -> bytes:
    """A PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12)
    panels = figure.subplots(2, 2)
    _panel(panels[0][0], "by position in the draft", {str(n): atlas.by_position[n] for n in sorted(atlas.by_position)})
    _panel(panels[0][1], "by class of the target's token", ranked(atlas.by_class))
    _panel(panels[1][0], "by domain", ranked(atlas.by_domain))
    _panel(panels[1][1], "by temperature", dict(sorted(atlas.by_temperature.items())))
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "redraft report"})
    return out.getvalue()


def ranked(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    """Most tested first."""
    return dict(sorted(tallies.items(), key=lambda item: (-item[1].tested, item[0])))


def _panel(axes: Any, title: str, tallies: Mapping[str, Tally]) -> None:
    names: Sequence[str] = list(tallies)[:_MOST]
    alphas = [tallies[name].accepted / tallies[name].tested for name in names]
    places = range(len(names))
    axes.barh(places, alphas, color=_BAR, height=0.7)
    axes.set_yticks(places, names, color=_INK)
    axes.set_ylim(max(len(names), 4) - 0.5, -0.5)  # a lone bar stays a bar
    axes.set_xlim(0, 1)
    axes.set_title(f"α {title}", loc="left", fontsize=10, color=_INK)
    for place, name, alpha in zip(places, names, alphas, strict=True):
        said = f"{alpha:.2f} of {tallies[name].tested:,}"
        inside = alpha > 0.75  # else it would leave the panel
        axes.text(
            alpha - 0.01 if inside else alpha + 0.01, place, said, va="center", ha="right" if inside else "left",
            fontsize=8, color="white" if inside else _INK,
        )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
