"""Stand-ins for the demo's tests: an API that streams, a stack's news from a script, and a synthetic run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import numpy as np

from ops.demo_alpha import Measurement
from ops.demo_chat import Answer
from ops.demo_report import Run
from ops.demo_watch import Board, Promotion
from ops.demo_windows import DomainCounts, Epochs, Window
from shared.counters import Counters
from shared.errors import ServiceDown
from shared.store import Champion
from shared.stream import StreamDepth

T = TypeVar("T")

START = 1_000_000.0  # seconds since the epoch at which synthetic runs begin
TOKENS_A_SECOND = 100.0


def measurement(order: int = 0, **changes: Any) -> Measurement:
    """A request of 50 positions at live α 0.6 and static α 0.4."""
    row = {
        "order": order,
        "domain": "sql",
        "finished_at": START + order,
        "version": "base",
        "seeded": False,
        "positions": 50,
        "live_sum": 30.0,
        "static_sum": 20.0,
        "live_expected_accepted": 24.0,
        "live_expected_tested": 40.0,
        "rounds_accepted": 24.0,
        "rounds_tested": 40.0,
        "static_expected_accepted": 16.0,
        "static_expected_tested": 40.0,
        "accepted": 24,
        "tested": 40,
    }
    return Measurement.of({**row, **changes})


class FakeApi:
    """Answers chat requests with `text` tokens; `refusals` come first."""

    def __init__(self, *, refusals: list[httpx.Response] | None = None, pieces: int = 3) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._refusals, self._pieces = refusals or [], pieces

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        if self._refusals:
            return self._refusals.pop(0)
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        chunks += [{"choices": [{"delta": {"content": "a"}}]}] * self._pieces
        chunks.append({"choices": [], "usage": {"completion_tokens": self._pieces}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


class FakeSources:
    """News that a test sets. `broken` names the questions that fail."""

    def __init__(self) -> None:
        self.epochs: dict[tuple[str, str], dict[str, float]] = {}
        self.pointer: Champion | None = None
        self.heartbeats: dict[str, dict[str, Any]] = {}
        self.news: list[Measurement] = []
        self.readiness = (200, "ready")
        self.broken: set[str] = set()

    def counters(self) -> Epochs:
        return self._unless_broken("redis", {key: dict(value) for key, value in self.epochs.items()})

    def champion(self) -> Champion | None:
        return self._unless_broken("redis", self.pointer)

    def statuses(self) -> Mapping[str, Mapping[str, Any]]:
        return self._unless_broken("redis", self.heartbeats)

    def stream_depth(self) -> StreamDepth:
        return self._unless_broken("redis", StreamDepth(0, 0, 0, 0, 0))

    def ready(self) -> tuple[int, str]:
        return self.readiness

    def measured(self) -> list[Measurement]:
        found, self.news = self.news, []
        return self._unless_broken("learner", found)

    def _unless_broken(self, whom: str, answer: T) -> T:
        if whom in self.broken:
            raise ServiceDown("away")
        return answer


def champion(number: int) -> Champion:
    return Champion(f"v{number}", "b", "base", "target", "eagle3", number, "", START + number)


def synthetic_run(*, seconds: float = 600.0, seed: int = 0) -> Run:
    """Warm-up, then SQL and German; static α falls at each drift, live α climbs back within a minute or two."""
    rng = np.random.default_rng(seed)
    drifts = {"sql": START + 0.2 * seconds, "german": START + 0.6 * seconds}
    promoted = [START + share * seconds for share in (0.3, 0.38, 0.5, 0.7, 0.82)]
    measured: list[Measurement] = []
    for order, at in enumerate(np.arange(START + 2, START + seconds, 1.0)):
        warm = at < drifts["sql"]
        domain = ("chat", "code", "maths")[order % 3] if warm else "sql" if at < drifts["german"] else "german"
        static = {"chat": 0.52, "code": 0.6, "maths": 0.66, "sql": 0.38, "german": 0.22}[domain]
        gain = 0.0 if warm else 0.25 * (1 - np.exp(-(at - drifts[domain]) / (0.12 * seconds)))
        positions = int(rng.integers(40, 96))
        level = np.clip(static + rng.normal(0, 0.07), 0.02, 0.98)
        measured.append(
            measurement(
                order,
                domain=domain,
                finished_at=float(at),
                version=f"v{count}" if (count := sum(at > swap for swap in promoted)) else "base",
                positions=positions,
                static_sum=float(level * positions),
                live_sum=float(min(level + gain + rng.normal(0, 0.02), 0.99) * positions),
            )
        )
    return Run(
        board=Board(
            windows=tuple(_windows(measured, seconds)),
            measurements=tuple(measured),
            promotions=tuple(
                Promotion(n, f"v{n}", at, "promoted: alpha 0.38 -> 0.47 (+0.090, at least +0.060)")
                for n, at in enumerate(promoted, start=1)
            ),
            counters=Counters({"traces_dropped": 0.0, "emitted|domain=sql": TOKENS_A_SECOND * seconds}),
            version="v5",
            learner={
                "state": "attempt 6: training, step 3 of 40",
                "attempts": 6,
                "promotions": 5,
                "decision": "promoted: alpha 0.38 -> 0.47 (+0.090, at least +0.060)",
            },
            replicas=({"drafter_version": "v5", "running": 8, "waiting": 0},),
            depth=StreamDepth(120, 1, 2, 0, 0),
        ),
        answers=[Answer(m.domain, m.finished_at - 8, m.finished_at - 7, m.finished_at, m.positions) for m in measured],
        drifted=("sql", "german"),
        first_sent=drifts,
        started_at=START,
        ended_at=START + seconds,
        seed=seed,
        about={"command": "redraft demo"},
    )


def _windows(measured: list[Measurement], seconds: float) -> list[Window]:
    windows = []
    for end in np.arange(5.0, seconds + 0.1, 5.0):
        mine = [m for m in measured if end - 5 <= m.finished_at - START < end]
        names = dict.fromkeys(m.domain for m in mine)
        domains = {
            name: DomainCounts(
                accepted=sum(m.live_sum for m in mine if m.domain == name),
                tested=sum(m.positions for m in mine if m.domain == name),
                drafted=400.0,
                steps=200.0,
                emitted=5 * TOKENS_A_SECOND / len(names),
            )
            for name in names
        }
        windows.append(Window(START + end - 5, START + end, TOKENS_A_SECOND * end, domains, "v5"))
    return windows
