"""Where the demo shows its progress: the full screen of a terminal, or a line now and then where there is none."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from ops.demo_scene import Scene
from ops.demo_view import plain, render

_DRAW_S = 0.5  # drawing costs time that the two cores need for serving
_LINE_S = 10.0


class Display(Protocol):
    def show(self, scene: Scene) -> None: ...
    def note(self, text: str) -> None: ...


class PlainDisplay:
    """A line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._next = console, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, scene: Scene) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_S
            self._console.print(plain(scene), soft_wrap=True, markup=False, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


class LiveDisplay:
    """The alternate screen; the notes are printed when it is left."""

    def __init__(self, console: Console) -> None:
        self._console, self._next = console, 0.0
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for text in self._notes:
            self._console.print(text, markup=False, highlight=False)

    def show(self, scene: Scene) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _DRAW_S
            width, height = self._console.size
            self._live.update(render(scene, width, height), refresh=True)

    def note(self, text: str) -> None:
        self._notes.append(text)


def display_for(console: Console, *, plain_output: bool) -> PlainDisplay | LiveDisplay:
    return PlainDisplay(console) if plain_output or not console.is_terminal else LiveDisplay(console)
