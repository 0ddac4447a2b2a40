"""Law 2 for the confidence cut: drafts that end where the drafter doubts them leave the target's distribution alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from serving.spec.gamma import Asking
from shared.trace import Sampling
from tests.laws.chi_square import ALARM, p_value
from tests.laws.test_distribution import TOKENS, _pair, cell, joint, trials
from tests.tiny_engine import Bench, GammaByDomain, request, serve

LEAST = 0.45  # cuts about half of the chains of these random models behind their first token


class Doubting(GammaByDomain):
    """As its domain says, but no further draft where the drafter gives those so far less than `LEAST`."""

    def __init__(self) -> None:
        super().__init__()
        self.chances: list[tuple[float, bool]] = []

    def choose(self, asking: Sequence[Asking], *, plain: int = 0) -> list[int]:
        for one in asking:
            one.recent.least = LEAST
        return super().choose(asking, plain=plain)

    def observe_chance(self, chance: float, held: bool) -> None:
        self.chances.append((chance, held))


@pytest.fixture(autouse=True)
def counted_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = count(0xC07)
    monkeypatch.setattr("serving.engine.sequence.fresh_seed", lambda: next(seeds))


@pytest.mark.parametrize("kind", ["eagle3", "model", "contrary"])
def test_answers_have_the_targets_joint_distribution(small_bench: Bench, kind: str) -> None:
    sampling, controller = Sampling(temperature=0.9), Doubting()
    target = small_bench.target(blocks=512, block_size=4)
    asked = trials(sampling, "t", 1500)
    answers, engine = serve(
        target, small_bench.drafter(kind, target), asked, controller, max_batch=48, prefill_tokens=4096
    )
    cells = [cell(answers[r.id].token_ids, small_bench.vocab) for r in asked]
    found, exact = np.bincount(cells, minlength=small_bench.vocab**TOKENS), joint(small_bench, sampling)
    assert p_value(found, exact) > ALARM
    for pair in ((0, 1), (2, 3)):
        assert p_value(_pair(found, pair), _pair(exact, pair)) > ALARM, pair
    cut = sum(chance < LEAST for chance, _ in controller.chances)
    assert 0.05 < cut / len(controller.chances) < 0.95, "all or none would show nothing"
    assert engine.counters.total("drafted") > 0


def test_coupled_answers_are_the_same_with_any_cut(small_bench: Bench) -> None:
    asked = [
        request(f"r{i}", (5, 4 + i), sampling, seed=seed, domain="g3", max_tokens=12)
        for i, (sampling, seed) in enumerate([(None, None), (Sampling(temperature=0.9), 7)] * 4)
    ]
    plain, _ = serve(small_bench.target(), None, asked, GammaByDomain())
    target, controller = small_bench.target(), Doubting()
    cut, _ = serve(target, small_bench.drafter("model", target), asked, controller)
    assert {i: a.token_ids for i, a in cut.items()} == {i: a.token_ids for i, a in plain.items()}
    assert any(chance < LEAST for chance, _ in controller.chances)
