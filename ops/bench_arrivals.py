"""Open-loop load: when requests arrive, and how they are handed to an engine that this very thread steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

from ops.bench_steps import StepWatch
from serving.engine.request import GenerationRequest


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Moments of `count` arrivals at `rate` a second, from the first at 0 on: gaps are exponential."""
    random, at, moments = Random(seed), 0.0, []
    for _ in range(count):
        moments.append(at)
        at += random.expovariate(rate)
    return moments


def feed_at(
    requests: Sequence[GenerationRequest],
    due: Sequence[float],  # seconds of the watch, ascending
    *,
    idle: Callable[[], bool],
    watch: StepWatch,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[GenerationRequest | None]:
    """Each request once it is due; None while none is and the engine has work. Sleeps where it has not."""
    for request, at in zip(requests, due, strict=True):
        while (wait := at - watch.now) > 0:
            if idle():
                sleep(wait)
            else:
                yield None
        watch.arrived(request.id, at)
        yield request
