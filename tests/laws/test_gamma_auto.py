"""A useless drafter costs next to nothing under gamma auto, and is switched on again by itself when it becomes good.

Costs are given, not measured, so that the controller's choices are the same on any machine.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from serving.engine.engine import Engine
from serving.spec.costs import CostCurve
from serving.spec.gamma import GammaController
from tests.fakes_drafters import PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer
from tests.tiny_engine import request, serve

REQUESTS, TOKENS = 120, 30


class Known(CostCurve):
    """A curve that is not measured."""

    def __init__(self, fixed: float, each: float) -> None:
        super().__init__()
        self.set(1, fixed + each)
        self.set(100, fixed + 100 * each)

    def add(self, size: int, seconds: float) -> None:
        """Constant by intent."""


def automatic(exploration: float) -> GammaController:
    made = GammaController(fixed=None, most=4, exploration=exploration)
    made.costs.by_rows, made.costs.draft_first, made.costs.draft_next = (
        Known(0.040, 0.001),
        Known(0.004, 0),
        Known(0.004, 0),
    )
    made.costs.add_target = lambda *_: None  # type: ignore[method-assign]
    return made


def shares(exploration: float, *, good_from: int, announced: bool) -> list[float]:
    """Share of the decoding rounds with drafts, by fifth of the requests; all drafts miss until request `good_from`."""
    asked = [request(f"r{i}", [3 + i % 13, 4 + i // 13], max_tokens=TOKENS) for i in range(REQUESTS)]
    answers = {r.id: greedy_answer(r.prompt_ids, TOKENS) for r in asked}
    ended: list[tuple[float, float]] = []
    good = False
    drafter = PlaybackDrafter(answers, wrong=lambda _: not good)

    def between(engine: Engine) -> None:
        nonlocal good
        total = engine.counters.total
        while len(ended) < total("requests_finished"):
            ended.append((total("spec_steps"), total("steps") - total("requests_finished")))
        if not good and len(ended) >= good_from:
            good = True
            if announced:
                drafter.version = "better"
                engine.controller.new_version()

    served, _ = serve(TokenTarget(), drafter, asked, automatic(exploration), max_batch=4, between=between)
    for r in asked:
        assert list(served[r.id].token_ids) == answers[r.id]
    fifth = REQUESTS // 5
    marks = [(0.0, 0.0), *ended[fifth - 1 :: fifth]]
    return [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(marks)]


def test_a_useless_drafter_is_off_but_for_its_share() -> None:
    found = shares(0.02, good_from=REQUESTS + 1, announced=False)
    assert all(0.01 < share < 0.04 for share in found[1:])


def test_a_new_version_that_is_good_is_switched_on_at_once() -> None:
    found = shares(0.0, good_from=2 * REQUESTS // 5, announced=True)
    assert found[1] == 0
    assert found[2] > 0.8
    assert found[4] == pytest.approx(1, abs=0.1)


def test_a_drafter_that_becomes_good_unannounced_is_found_by_exploration() -> None:
    found = shares(0.1, good_from=2 * REQUESTS // 5, announced=False)
    assert found[1] < 0.2
    assert found[4] > 0.8
