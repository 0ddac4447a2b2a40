"""Laws 1 and 5 for requests that begin alike: a shared beginning is what a computation of one's own would have given.

Target rows, drafter rows and the features of a trace are compared with those of an engine that shares nothing, with
swaps of the drafter between the requests and in the middle of them.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from serving.batch import Answer
from serving.engine.engine import Engine, Tracing
from serving.engine.request import GenerationRequest
from shared.trace import Sampling, TraceRecord
from tests.laws.test_rollback import CLOSE, drafter_kv, fresh, rows
from tests.tiny_engine import DRAFTING, KINDS, Bench, fixed_gamma, request, serve

SYSTEM = [(7 * i) % 300 + 5 for i in range(43)]  # five blocks of eight and a piece of the sixth


def asked(count: int, *, first: int = 0, tokens: int = 20) -> list[GenerationRequest]:
    """Greedy, seeded and drawn ones by turns, of which each begins like the others and ends its own way."""
    kinds = ((None, None), (Sampling(temperature=0.8), 11), (Sampling(temperature=0.7, top_p=0.9), None))
    return [
        request(f"r{i}", [*SYSTEM, 60 + i, 61], kinds[i % 3][0], seed=kinds[i % 3][1], max_tokens=tokens)
        for i in range(first, first + count)
    ]


@pytest.mark.parametrize(("kind", "swapped"), list(product(DRAFTING, [False, True])))
def test_a_reused_beginning_equals_a_fresh_one(bench: Bench, kind: str, swapped: bool) -> None:
    """The second and later requests share blocks of the first; with `swapped` another version wrote the drafter's."""
    target = bench.target(block_size=8)
    drafter = bench.drafter(kind, target)
    looked = set()

    def look(engine: Engine) -> None:
        assert engine.drafter is not None
        if swapped and engine.counters.total("requests_finished") == 1 and engine.drafter.version == "base":
            bench.swap(engine.drafter)
        for sequence in engine.scheduler.running:
            if sequence.id == "r0" or sequence.committed < 4 or sequence.id in looked:
                continue
            looked.add(sequence.id)
            version = engine.drafter.version
            again, other = fresh(bench, kind, version, sequence.tokens[: sequence.kv_len])
            torch.testing.assert_close(
                rows(target.kv, sequence.table, sequence.kv_len),
                rows(again.target.kv, other.table, sequence.kv_len),
                **CLOSE,
            )
            known = sequence.draft.kv_len
            assert sequence.draft.version == version
            assert known > len(SYSTEM)
            torch.testing.assert_close(
                rows(drafter_kv(drafter), sequence.table, known),
                rows(drafter_kv(again.drafter), other.table, known),
                **CLOSE,
            )

    _, engine = serve(target, drafter, asked(4), fixed_gamma(2), max_batch=1, prefill_tokens=24, between=look)
    assert looked == {"r1", "r2", "r3"}
    assert engine.prefix is not None
    assert engine.prefix.reused == 3 * 40
    assert (engine.drafter is not None and engine.drafter.version == "v1") == swapped


def coupled(answers: dict[str, Answer]) -> dict[str, tuple[int, ...]]:
    """Of the requests whose tokens are determined: greedy and seeded."""
    return {id: answer.token_ids for id, answer in answers.items() if int(id[1:]) % 3 < 2}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_without_reuse(bench: Bench, kind: str) -> None:
    """Under blocks for about two requests, so that cached ones are taken away all the time, and with a swap a step."""
    plain, _ = serve(bench.target(), None, asked(9), fixed_gamma(0), prefix_cache=False)
    target = bench.target(blocks=24, block_size=8)

    def swap(engine: Engine) -> None:
        bench.swap(engine.drafter)

    answers, engine = serve(
        target, bench.drafter(kind, target), asked(9), fixed_gamma(3), max_batch=3, prefill_tokens=24, between=swap
    )
    assert coupled(answers) == coupled(plain)
    assert engine.prefix is not None
    assert engine.prefix.reused >= 40, "nothing was shared"


def test_traces_of_a_shared_beginning_carry_all_features(bench: Bench) -> None:
    def served(prefix_cache: bool) -> dict[str, tuple[TraceRecord, Tensor]]:
        found: dict[str, tuple[TraceRecord, Tensor]] = {}

        def sink(record: TraceRecord, features: Tensor | None) -> None:
            assert features is not None
            found[record.id] = record, features

        target = bench.target(block_size=8)
        serve(
            target,
            bench.drafter("eagle3", target),
            asked(4),
            fixed_gamma(2),
            max_batch=2,
            prefix_cache=prefix_cache,
            tracing=Tracing(sink, "replica", 4, 1.0, lambda _: True),
        )
        return found

    shared, own = served(True), served(False)
    for id in ("r0", "r1", "r3"):  # r2 is drawn: its text differs from run to run
        record, features = shared[id]
        assert record.has_features
        assert record.output_ids.tolist() == own[id][0].output_ids.tolist()
        assert len(features) == len(record.prompt_ids) + len(record.output_ids) - 1
        torch.testing.assert_close(features, own[id][1], rtol=2e-3, atol=2e-3)  # float16
