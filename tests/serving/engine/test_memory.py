"""A thousand requests leave nothing behind but counters and cached blocks, which are free for the asking."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import Tensor

from serving.batch import BatchRunner
from serving.engine.engine import Limits, Tracing
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence
from serving.spec.gamma import GammaController
from shared.trace import Sampling
from tests.tiny_engine import Bench, request

KINDS = ((None, None), (Sampling(temperature=0.8), 3), (Sampling(temperature=0.8, top_p=0.9), None))


def asked(first: int, count: int) -> Iterator[GenerationRequest]:
    """Short ones of every kind, half of which begin like others."""
    for i in range(first, first + count):
        sampling, seed = KINDS[i % 3]
        prompt = [5 + i % 2 * (i % 250)] * 9 + [5 + i % 300, 6]
        yield request(f"r{i}", prompt, sampling, seed=seed, max_tokens=3 + i % 3, domain=f"d{i % 4}")


def live() -> tuple[int, int]:
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    return sum(kind is Sequence for kind in kinds), sum(issubclass(kind, Tensor) for kind in kinds)


def test_a_thousand_requests_leave_nothing_behind(bench: Bench) -> None:
    target = bench.target(blocks=64, block_size=4)
    controller = GammaController(fixed=None, most=2, exploration=0.05)
    traced = 0

    def sink(*_: object) -> None:
        nonlocal traced
        traced += 1

    runner = BatchRunner(
        target,
        bench.drafter("eagle3", target),
        controller,
        Limits(64, 16, 64),
        Tracing(sink, "replica", 4, 1.0, lambda _: True),
    )
    engine = runner.engine
    served = sum(1 for _ in runner.run(asked(0, 200)))
    sequences, tensors = live()
    fields = len(engine.counters.fields)
    served += sum(1 for _ in runner.run(asked(200, 800)))
    assert served == traced == 1000
    assert sequences == 0
    after = live()
    assert after[0] == 0
    # Pools and weights were there before; the last step's tensors may be held by caches of one step.
    assert after[1] <= tensors + 8
    assert len(engine.counters.fields) <= fields + 8, "counters go by domain, version and depth, not by request"
    assert engine.allocator.free == engine.allocator.num_blocks
    assert 0 < engine.allocator.named <= engine.allocator.num_blocks
    engine.allocator.check([])
    assert engine.prefix is not None
    assert engine.prefix.reused > 0
