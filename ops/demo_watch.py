"""Looks at the running stack once a second: counters, the learner's measurements, champion, heartbeats, stream.

Owns everything that the demo has seen so far and hands out a `Board`, one consistent view of it. A part that does not
answer leaves its last news standing and is named in `trouble`; that is never the end of a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ops.demo_alpha import Measurement
from ops.demo_windows import Epochs, Meter, Window
from shared.counters import Counters
from shared.errors import ServiceDown
from shared.store import Champion
from shared.stream import StreamDepth

LOOK_S = 1.0
WINDOW_S = 5.0


class Sources(Protocol):
    """Where the news comes from. Every method may raise ServiceDown, and none waits long."""

    def counters(self) -> Epochs: ...
    def champion(self) -> Champion | None: ...
    def statuses(self) -> Mapping[str, Mapping[str, Any]]: ...
    def stream_depth(self) -> StreamDepth: ...
    def ready(self) -> tuple[int, str]:
        """Status and body of /readyz; 0 when nothing answers."""

    def measured(self) -> list[Measurement]:
        """Those that came since the last call."""


@dataclass(frozen=True)
class Promotion:
    number: int  # of the champion
    version: str
    at: float  # seconds since the epoch
    reason: str  # empty until the learner has said it


@dataclass(frozen=True)
class Board:
    """What is known at one moment."""

    windows: tuple[Window, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    counters: Counters = field(default_factory=Counters)  # since the run began
    version: str = ""  # of the drafter that serves
    learner: Mapping[str, Any] = field(default_factory=dict)
    replicas: tuple[Mapping[str, Any], ...] = ()
    depth: StreamDepth | None = None
    trouble: tuple[str, ...] = ()


class Watch:
    """`start()` sets the zero; `board` is always the newest view."""

    def __init__(self, sources: Sources, *, clock: Callable[[], float] = time.time) -> None:
        self._sources, self._clock = sources, clock
        self._windows: list[Window] = []
        self._measurements: list[Measurement] = []
        self._promotions: list[Promotion] = []
        self._news: dict[str, Any] = {}
        self._trouble: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._meter = Meter({}, clock())
        self._champion = 0  # number of the last one seen
        self._cut_at = clock()
        self.board = Board()
        self.ready_at = clock()  # when the API was last ready
        self.ready_answer = ""

    def start(self) -> None:
        """Raises ServiceDown when there is nothing to look at."""
        champion = self._sources.champion()
        self._champion = champion.number if champion else 0
        self._cut_at = self.ready_at = self._clock()
        self._meter = Meter(self._sources.counters(), self._cut_at)
        self._thread.start()

    def stop(self) -> None:
        """Ends with one last look and window."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self.look()
        self._cut()

    def look(self) -> None:
        """One round of questions."""
        self._ask("redis", self._sources.counters, self._meter.look)
        self._ask("redis", self._sources.statuses, lambda statuses: self._news.update(statuses=statuses))
        self._ask("redis", self._sources.stream_depth, lambda depth: self._news.update(depth=depth))
        self._ask("redis", self._sources.champion, self._note_champion)
        self._ask("learner", self._sources.measured, self._measurements.extend)
        self._ask("api", self._sources.ready, self._note_ready)
        if self._clock() - self._cut_at >= WINDOW_S:
            self._cut()
        self._publish()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.look()

    def _ask(self, whom: str, question: Callable[[], Any], note: Callable[[Any], None]) -> None:
        try:
            answer = question()
        except ServiceDown as error:
            self._trouble[whom] = f"{whom}: {error}"
            return
        self._trouble.pop(whom, None)
        note(answer)

    def _note_champion(self, champion: Champion | None) -> None:
        if champion is not None and champion.number > self._champion:
            self._champion = champion.number
            self._promotions.append(Promotion(champion.number, champion.version, champion.created_at, ""))
        # The pointer moves before the heartbeat that tells why.
        learner = self._learner()
        for i, promotion in enumerate(self._promotions):
            if not promotion.reason and learner.get("number") == promotion.number:
                self._promotions[i] = replace(promotion, reason=str(learner.get("decision", "")))

    def _note_ready(self, answer: tuple[int, str]) -> None:
        status, self.ready_answer = answer
        if status == 200:
            self.ready_at = self._clock()
        else:
            self._trouble["api"] = f"the API is not ready: {self.ready_answer[:120]}"

    def _cut(self) -> None:
        self._cut_at = self._clock()
        self._windows.append(self._meter.cut(self._cut_at, self._version()))
        self._publish()

    def _publish(self) -> None:
        self.board = Board(
            windows=tuple(self._windows),
            measurements=tuple(self._measurements),
            promotions=tuple(self._promotions),
            counters=self._meter.since_start,
            version=self._version(),
            learner=self._learner(),
            replicas=self._replicas(),
            depth=self._news.get("depth"),
            trouble=(*self._trouble.values(), *(f"learner: {text}" for text in self._learner().get("trouble", ()))),
        )

    def _learner(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._news.get("statuses", {}).get("learner", {})
        return found

    def _replicas(self) -> tuple[Mapping[str, Any], ...]:
        statuses: Mapping[str, Mapping[str, Any]] = self._news.get("statuses", {})
        return tuple(status for name, status in statuses.items() if name.startswith("replica:"))

    def _version(self) -> str:
        return next((str(replica.get("drafter_version", "")) for replica in self._replicas()), "")
