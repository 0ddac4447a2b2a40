"""The live view in the terminal, and its one-line form for pipes. Draws a `Scene`; decides nothing."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ops.demo_curve import Line, Mark, columns_of, curve
from ops.demo_scene import Scene, column_of, curves, domain_rows, newest, rates

_LIVE, _STATIC, _DRIFT, _SWAP, _BASE = "bold cyan", "dark_orange3", "white", "green3", "grey50"
_SIDE = 34  # characters of the column at the right
_DOMAINS, _GATE = 9, 5  # rows of these two


def render(scene: Scene, width: int, height: int) -> RenderableType:
    """Fits `width` x `height` characters; made for 100 x 30."""
    curve_height = max(height - 2 - _DOMAINS - _GATE, 8)
    layout = Layout()
    layout.split_column(
        Layout(_header(scene, width), size=2),
        Layout(name="middle", size=curve_height),
        Layout(name="lower", size=_DOMAINS),
        Layout(_gate(scene), size=_GATE),
    )
    layout["middle"].split_row(
        Layout(_alpha_panel(scene, width - _SIDE - 4, curve_height - 2)),
        Layout(_facts(scene), size=_SIDE),
    )
    layout["lower"].update(_domains(scene))
    return layout


def plain(scene: Scene) -> str:
    """One line of news."""
    board, (speed, gamma) = scene.board, rates(scene)
    alphas = [
        f"{row.domain} α {_number(row.counted)} (live {_number(row.live)}, static {_number(row.static)})"
        for row in domain_rows(scene)
        if row.active
    ]
    parts = [
        f"{_clock(scene.elapsed)} {scene.phase}",
        *alphas,
        f"{_number(speed, 0)} tokens/s, gamma {_number(gamma, 1)}",
        f"drafter {board.version or '–'}",
        f"learner {_learner_state(scene)}",
        *board.trouble,
    ]
    return " | ".join(parts)


def _header(scene: Scene, width: int) -> RenderableType:
    title = Table.grid(expand=True)
    title.add_column()
    title.add_column(justify="right")
    control = "" if scene.learning else "  [bold yellow]control: nothing is promoted[/]"
    title.add_row(
        f"[bold]Redraft[/]  {escape(scene.model)}  [bold]{scene.phase}[/]{control}",
        f"{_clock(scene.elapsed)} / {_clock(scene.seconds)}",
    )
    return Group(title, _progress(scene, width))


def _progress(scene: Scene, width: int) -> Text:
    bar, passed = Text(), scene.elapsed / max(scene.seconds, 1e-9) * width
    start = 0.0
    for name, share in scene.phases:
        end = start + share * width
        cells = round(end) - round(start)
        label = f" {name} ".center(cells, "━")[:cells]
        done = min(max(round(passed) - round(start), 0), cells)
        bar.append(label[:done], "cyan")
        bar.append(label[done:], "grey37")
        start = end
    return bar


def _alpha_panel(scene: Scene, width: int, height: int) -> Panel:
    columns = columns_of(width)
    live, static = curves(scene, columns)
    marks = [Mark(column_of(scene, at, columns), name, _DRIFT) for name, at in scene.first_sent.items()]
    marks += [
        Mark(column_of(scene, p.at, columns), f"▲{p.version.removeprefix('v')}", _SWAP) for p in scene.board.promotions
    ]
    legend = Text.assemble("α  ", ("━ live drafter  ", _LIVE), ("━ static drafter ", _STATIC))
    picture = curve([Line(static, _STATIC), Line(live, _LIVE)], marks, width=width, height=height)
    return Panel(picture, title=legend, title_align="left", border_style=_BASE)


def _facts(scene: Scene) -> Panel:
    board, (speed, gamma) = scene.board, rates(scene)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="grey62", no_wrap=True, min_width=len("measured"))
    table.add_column()
    running, waiting = (int(sum(r.get(name, 0) for r in board.replicas)) for name in ("running", "waiting"))
    table.add_row("tokens/s", f"[bold]{_number(speed, 0)}[/]")
    table.add_row("gamma", _number(gamma, 1))
    table.add_row("drafter", f"[bold]{board.version or '–'}[/]")
    table.add_row("requests", f"{running} running, {waiting} waiting")
    table.add_row("answered", f"{scene.answered:,}" + (f", [red]{scene.failed} failed[/]" if scene.failed else ""))
    depth = board.depth
    table.add_row("stream", f"{depth.lag + depth.pending} to do of {depth.length}" if depth else "–")
    table.add_row("measured", _measured(scene))
    dropped = board.counters.total("traces_dropped") + board.counters.total("features_dropped")
    table.add_row("dropped", f"[yellow]{dropped:,.0f}[/]" if dropped else "0")
    for name, value in _learner_facts(scene):
        table.add_row(name, value)
    return Panel(table, title="now", title_align="left", border_style=_BASE)


def _domains(scene: Scene) -> RenderableType:
    table = Table(expand=True, box=box.SIMPLE_HEAD, border_style=_BASE, header_style="grey62", padding=(0, 1))
    table.add_column("  domain", ratio=2)
    for name in ("α as served", "live", "static", "gain", "measured"):
        table.add_column(name, justify="right", ratio=2, no_wrap=True)
    for row in domain_rows(scene)[-(_DOMAINS - 3) :]:
        gain = row.live - row.static if row.live is not None and row.static is not None else None
        colour = "green3" if gain is not None and gain > 0.005 else "red" if gain is not None and gain < -0.005 else ""
        table.add_row(
            ("▸ " if row.active else "  ") + row.domain,
            _number(row.counted),
            Text(_number(row.live), _LIVE),
            Text(_number(row.static), _STATIC),
            Text("–" if gain is None else f"{gain:+.3f}", colour),
            f"{row.requests:,}",
            style="" if row.active else "grey50",
        )
    return table


def _gate(scene: Scene) -> Panel:
    said = str(scene.board.learner.get("decision") or "no attempt has been judged yet")
    colour = "green3" if said.startswith("promoted") else "yellow" if said.startswith("kept") else "grey62"
    lines = [Text(said, colour)]
    if scene.board.trouble:
        lines.append(Text("; ".join(scene.board.trouble), "red", no_wrap=True, overflow="ellipsis"))
    else:
        named = "  ".join(f"{name} {url}" for name, url in scene.urls.items())
        lines.append(Text(f"{named}  Ctrl-C stops", "grey50", no_wrap=True, overflow="ellipsis"))
    return Panel(Group(*lines), title="last decision of the gate", title_align="left", border_style=_BASE)


def _measured(scene: Scene) -> str:
    board = scene.board
    behind = scene.now - newest(board.measurements) if board.measurements else 0.0
    return f"{len(board.measurements):,}" + (f", {behind:.0f} s behind" if behind > 5 else "")


def _learner_state(scene: Scene) -> str:
    return str(scene.board.learner.get("state") or "no sign of life yet")


def _learner_facts(scene: Scene) -> list[tuple[str, str]]:
    """What it does, part by part, and what it waits for before the next attempt."""
    learner = scene.board.learner
    whole, _, details = _learner_state(scene).partition(": ")
    state, *more = [whole, *details.split(", ")] if details else [whole]
    facts = [("learner", f"[bold]{escape(state)}[/]"), *(("", escape(part)) for part in more)]
    if learner.get("next") and not more:
        facts.append(("next", escape(str(learner["next"]))))
    if "attempts" in learner:
        facts.append(("attempts", f"{learner['attempts']}, {learner.get('promotions', 0)} promoted"))
    return facts


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
