"""What the engine measures and keeps beside the answers."""

from __future__ import annotations

import pytest

from serving.engine.engine import Engine
from serving.spec.costs import RoundCosts
from serving.spec.gamma import GammaController
from shared.trace import Sampling
from tests.fakes_drafters import PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer
from tests.tiny_engine import Bench, fixed_gamma, request, serve


class Spy(RoundCosts):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []  # batch, rows

    def add_target(self, batch: int, rows: int, seconds: float) -> None:
        assert seconds > 0
        self.sizes.append((batch, rows))
        super().add_target(batch, rows, seconds)


def spied(gamma: int) -> tuple[GammaController, Spy]:
    made, spy = fixed_gamma(gamma), Spy()
    made.costs = spy
    return made, spy


@pytest.mark.parametrize("gamma", [0, 3])
def test_costs_are_learnt_from_steps_without_prompts_by_the_rows_that_ran(gamma: int) -> None:
    """A prompt's last piece decides a token too, but its rows are not those of decoding."""
    asked = [request(f"r{i}", [3 + i] * (5 + 7 * i), max_tokens=12, ignore_eos=i == 1) for i in range(5)]
    target, (controller, spy) = TokenTarget(), spied(gamma)
    drafter = PlaybackDrafter({r.id: greedy_answer(r.prompt_ids, 12) for r in asked}, wrong=lambda place: place == 4)
    expected: list[int] = []
    rows = prompts = 0

    def between(engine: Engine) -> None:
        nonlocal rows, prompts
        now, rows = target.rows - rows, target.rows
        begun = sum(len(r.prompt_ids) for r in asked) - sum(
            s.prompt_len - min(s.kv_len, s.prompt_len) for s in engine.scheduler
        )
        if begun == prompts:
            expected.append(now)
        prompts = begun

    serve(target, drafter, asked, controller, prefill_tokens=6, max_batch=5, between=between)
    assert [rows for _, rows in spy.sizes] == expected
    assert all(batch <= rows <= batch * (1 + gamma) for batch, rows in spy.sizes)


def test_a_plain_request_keeps_no_features_for_a_drafter_that_never_reads_them(bench: Bench) -> None:
    target = bench.target()
    kept: list[int] = []

    def between(engine: Engine) -> None:
        kept.extend(len(s.draft.features) for s in engine.scheduler if not s.request.params.speculative)

    asked = [request("plain", [5, 6, 7], max_tokens=12, speculative=False), request("r", [5, 6], max_tokens=12)]
    answers, engine = serve(target, bench.drafter("eagle3", target), asked, fixed_gamma(2), between=between)
    assert not any(kept)
    assert answers["plain"].ending.stats.num_spec_steps == 0
    assert answers["r"].ending.stats.num_spec_steps > 0
    assert engine.counters.total("emitted") == 24


def test_waiting_features_hold_no_more_than_their_own_rows(bench: Bench) -> None:
    """Under gamma 0 features gather until the next draft: of this request alone, not of whoever shared its steps."""
    target = bench.target()
    sizes: list[tuple[int, int]] = []

    def between(engine: Engine) -> None:
        for sequence in engine.scheduler:
            for part in sequence.draft.features:
                sizes.append((part.untyped_storage().nbytes(), part.numel() * part.element_size()))

    asked = [request(f"r{i}", [9 + i] * 20, Sampling(), max_tokens=6) for i in range(4)]
    serve(target, bench.drafter("eagle3", target), asked, fixed_gamma(0), between=between)
    assert sizes
    assert all(stored == own for stored, own in sizes)


def test_seconds_are_counted_by_part_of_a_step() -> None:
    asked = [request("r", [3, 4], max_tokens=10)]
    _, engine = serve(TokenTarget(), PlaybackDrafter({"r": greedy_answer([3, 4], 10)}), asked, fixed_gamma(2))
    for name in ("schedule_s", "draft_s", "verify_s", "sample_s"):
        assert engine.counters.total(name) > 0
