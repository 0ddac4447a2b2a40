"""Laws 1, 3, 4, 6 and 7 over the product of parameters, drafters, gammas and batches.

The plain path, each request alone, is held against a plain-Python reference; all else is held against the plain path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.batch import Answer
from serving.engine.engine import Engine
from serving.engine.request import GenerationRequest
from tests.laws.mixtures import TIE, any_requests, check_equal, determined, mixed_requests
from tests.oracle import Reference
from tests.tiny_engine import DRAFTING, KINDS, Bench, GammaByDomain, fixed_gamma, serve

VOCAB, COUNT = 320, 200  # of the bench; of the requests that the issue asks for


@pytest.fixture(scope="module")
def reference(bench: Bench) -> Reference:
    return Reference(bench)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Mapping[str, Answer]:
    """Every request by itself, without a drafter."""
    return serve(bench.target(), None, determined(mixed_requests(VOCAB, COUNT)), fixed_gamma(0), max_batch=1)[0]


def swapping(bench: Bench, steps: int) -> Callable[[Engine], None]:
    count = 0

    def between(engine: Engine) -> None:
        nonlocal count
        count += 1
        if steps and count % steps == 0:
            bench.swap(engine.drafter)

    return between


def test_the_plain_path_follows_the_reference(reference: Reference, alone: Mapping[str, Answer]) -> None:
    asked = determined(mixed_requests(VOCAB, COUNT))
    for r in asked:
        answer = alone[r.id]
        assert max(reference.gaps(r, answer.token_ids)) < TIE, r
    reasons = Counter((alone[r.id].ending.reason, type(alone[r.id].ending.stop_reason).__name__) for r in asked)
    # Every way to end is among them.
    assert set(reasons) == {("stop", "NoneType"), ("stop", "int"), ("stop", "str"), ("length", "NoneType")}


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        pytest.param(turn, kind, id=kind, marks=() if kind in ("eagle3", "model") else pytest.mark.slow)
        for turn, kind in enumerate(KINDS)
    ],
)
def test_200_mixed_requests_together(
    bench: Bench, reference: Reference, alone: Mapping[str, Answer], turn: int, kind: str
) -> None:
    asked, target = mixed_requests(VOCAB, COUNT, turn=turn), bench.target()
    drafter = bench.drafter(kind, target)
    answers, engine = serve(target, drafter, asked, GammaByDomain(), max_batch=24, prefill_tokens=40)
    check_equal(reference, asked, answers, alone)
    accepted, tested = engine.counters.alpha_counts()
    assert (0 < accepted < tested) == (kind != "none"), "the drafts say something only if some fall and some stand"


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_swaps_in_the_middle_and_a_restart(
    bench: Bench, reference: Reference, alone: Mapping[str, Answer], kind: str
) -> None:
    """Another process's engine, fresh caches, versions that change every third step: seeds still say the same."""
    asked, target = mixed_requests(VOCAB, 60, turn=3), bench.target(blocks=96)
    drafter = bench.drafter(kind, target)
    answers, engine = serve(target, drafter, asked, GammaByDomain(), max_batch=9, between=swapping(bench, 3))
    check_equal(reference, asked, answers, alone)
    assert min(engine.counters.total("drafted", version=version) for version in ("base", "v1")) > 0


@pytest.fixture(scope="module")
def stand(bench: Bench) -> Callable[[str], tuple[object, object]]:
    """A target and a drafter of each kind, loaded once: engines leave nothing in them that matters."""

    @cache
    def load(kind: str) -> tuple[object, object]:
        target = bench.target()
        return target, bench.drafter(kind, target)

    return load


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    asked=any_requests(VOCAB),
    kind=st.sampled_from(DRAFTING),
    batch=st.integers(1, 5),
    prefill=st.integers(4, 40),
    swap=st.sampled_from([0, 0, 5]),
)
def test_any_parameters_any_drafter_any_batch(
    bench: Bench,
    reference: Reference,
    stand: Callable[[str], tuple[object, object]],
    asked: list[GenerationRequest],
    kind: str,
    batch: int,
    prefill: int,
    swap: int,
) -> None:
    target, drafter = stand(kind)
    plain, _ = serve(target, None, determined(asked), fixed_gamma(0), max_batch=1)  # type: ignore[arg-type]
    between = swapping(bench, swap)
    answers, _ = serve(
        target,
        drafter,
        asked,
        GammaByDomain(),
        max_batch=batch,
        prefill_tokens=prefill,
        between=between,  # type: ignore[arg-type]
    )
    check_equal(reference, asked, answers, plain)
