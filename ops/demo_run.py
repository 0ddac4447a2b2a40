"""One run against a started stack: traffic, watching, the display, the wait for the learner, and what came of it.

Must run in the main thread: the stack's children are tied to the thread that starts them again. However a run ends
(time, Ctrl-C, a stack that broke), `result` is what was seen until then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ops.demo_chat import Asking
from ops.demo_display import Display
from ops.demo_plan import Feed, Plan
from ops.demo_report import Run
from ops.demo_scene import Scene
from ops.demo_traffic import Traffic
from ops.demo_watch import Watch
from shared.errors import ServiceDown

IN_FLIGHT_S = 30.0  # for the last answers, when the time for traffic is over
DRAIN_S = 60.0  # for the learner to measure what it was sent
QUIET_S = 8.0  # without news and with an empty stream, no measurement is coming any more
LOST_S = 90.0  # a replica that is not ready for this long is not coming back
_TICK_S = 0.25
_TEND_S = 1.0


class Tended(Protocol):
    """The part of a stack that a run looks after."""

    def tend(self) -> list[str]: ...


@dataclass(frozen=True)
class Session:
    """What a run is, besides its plan."""

    api: str
    urls: Mapping[str, str]  # to be shown
    asking: Asking
    users: int
    seconds: float  # of traffic
    deadline: float  # monotonic: draining ends here at the latest
    learning: bool  # False: the control
    measuring: bool  # a learner runs
    seed: int
    about: Mapping[str, Any]


class DemoRun:
    def __init__(
        self, session: Session, plan: Plan, stack: Tended, watch: Watch, traffic: Traffic | None = None
    ) -> None:
        self._session, self._plan, self._stack, self._watch = session, plan, stack, watch
        self._traffic = traffic or Traffic(session.api, Feed(plan, session.seconds), session.asking, session.users)
        self._ended_at = 0.0
        self._tended_at = 0.0

    def __call__(self, display: Display) -> None:
        """Raises ServiceDown when the stack is lost on the way."""
        self._watch.start()
        self._traffic.start()
        try:
            self._until_sent(display)
            self._ended_at = time.time()
            if self._session.measuring:
                self._until_measured(display)
        finally:
            self._traffic.stop()
            self._ended_at = self._ended_at or time.time()
            self._watch.stop()

    @property
    def result(self) -> Run:
        return Run(
            board=self._watch.board,
            answers=tuple(self._traffic.answers),
            drifted=self._plan.drifted,
            first_sent=self._first_sent(),
            started_at=self._traffic.started_at,
            ended_at=self._ended_at or time.time(),
            seed=self._session.seed,
            about=self._session.about,
            learning=self._session.learning,
        )

    def _until_sent(self, display: Display) -> None:
        latest = time.monotonic() + self._session.seconds + IN_FLIGHT_S
        while not self._traffic.over and time.monotonic() < latest:
            phase = self._traffic.phase
            self._tick(display, phase.name if phase else "the last answers")
            away_s = time.time() - self._watch.ready_at
            if away_s > LOST_S:
                raise ServiceDown(
                    f"the API at {self._session.api} has not been ready for {away_s:.0f} s; its last answer: "
                    f"{self._watch.ready_answer}. The logs are in the home folder, see `redraft config`."
                )

    def _until_measured(self, display: Display) -> None:
        latest = min(time.monotonic() + DRAIN_S, self._session.deadline)
        measured, news_at = -1, time.monotonic()
        answered = sum(1 for answer in self._traffic.answers if not answer.error)
        while time.monotonic() < latest:
            board = self._watch.board
            if len(board.measurements) != measured:
                measured, news_at = len(board.measurements), time.monotonic()
            idle = board.depth is not None and board.depth.lag + board.depth.pending == 0
            quiet = idle and time.monotonic() - news_at > QUIET_S
            if quiet or measured >= answered - board.counters.total("traces_dropped"):
                return
            self._tick(display, f"the learner measures the last {answered - measured}")

    def _tick(self, display: Display, phase: str) -> None:
        if time.monotonic() - self._tended_at > _TEND_S:
            self._tended_at = time.monotonic()
            for name in self._stack.tend():
                display.note(f"{name} had ended and was started again")
        display.show(self._scene(phase))
        time.sleep(_TICK_S)

    def _scene(self, phase: str) -> Scene:
        session, answers = self._session, self._traffic.answers
        failed = sum(1 for answer in answers if answer.error)
        return Scene(
            board=self._watch.board,
            started_at=self._traffic.started_at,
            now=time.time(),
            seconds=session.seconds,
            phase=phase,
            phases=[(phase.name, phase.share) for phase in self._plan.phases],
            first_sent=self._first_sent(),
            answered=len(answers) - failed,
            failed=failed,
            users=session.users,
            model=session.asking.model,
            learning=session.learning,
            urls=session.urls,
        )

    def _first_sent(self) -> dict[str, float]:
        """Of the drifted domains."""
        sent = {domain: self._traffic.first_sent(domain) for domain in self._plan.drifted}
        return {domain: at for domain, at in sent.items() if at is not None}
