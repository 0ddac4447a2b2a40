"""When requests are sent: open loop at random times whoever answers, or closed loop of users that wait for answers.

An open loop never slows down with the server, so a queue that grows is seen in the latencies. Arrival times and the
order of prompts follow from the seed alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from ops.loadgen_request import Form, Prompt, Sample, send


@dataclass(frozen=True)
class Plan:
    """Either `rate` (requests a second, open loop) or `concurrency` (users, closed loop) is set."""

    requests: int
    rate: float | None = None
    concurrency: int | None = None
    duration: float | None = None  # seconds after which nothing more is sent
    seed: int = 0


def arrivals(plan: Plan) -> list[float]:
    """Seconds from the start, of a Poisson process: gaps are exponential with mean 1/rate."""
    assert plan.rate is not None, "only an open loop has arrival times"
    chance = random.Random(f"arrivals/{plan.seed}")
    times = itertools.accumulate(chance.expovariate(plan.rate) for _ in range(plan.requests))
    return [at for at in times if plan.duration is None or at <= plan.duration]


def in_order(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """All prompts in an order of the seed, and again."""
    shuffled = list(prompts)
    random.Random(f"prompts/{seed}").shuffle(shuffled)
    return itertools.cycle(shuffled)


async def run(
    client: httpx.AsyncClient,
    form: Form,
    prompts: Sequence[Prompt],
    plan: Plan,
    heard: Callable[[Sample], None] = lambda _: None,
) -> list[Sample]:
    """Samples in the order of sending; `heard` gets each when it has ended."""
    feed = in_order(prompts, plan.seed)
    samples = await (_open if plan.rate is not None else _closed)(client, form, feed, plan, heard)
    return sorted(samples, key=lambda sample: sample.number)


async def _open(
    client: httpx.AsyncClient, form: Form, feed: Iterator[Prompt], plan: Plan, heard: Callable[[Sample], None]
) -> list[Sample]:
    started = time.perf_counter()

    async def one(number: int, at: float, prompt: Prompt) -> Sample:
        await asyncio.sleep(started + at - time.perf_counter())
        sample = await send(client, form, prompt, number, started + at)
        heard(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(n, at, next(feed))) for n, at in enumerate(arrivals(plan))]
    return [task.result() for task in tasks]


async def _closed(
    client: httpx.AsyncClient, form: Form, feed: Iterator[Prompt], plan: Plan, heard: Callable[[Sample], None]
) -> list[Sample]:
    assert plan.concurrency is not None, "a plan without a rate has users"
    numbers, samples = iter(range(plan.requests)), list[Sample]()
    until = time.perf_counter() + (plan.duration or float("inf"))

    async def user() -> None:
        while (now := time.perf_counter()) < until and (number := next(numbers, None)) is not None:
            sample = await send(client, form, next(feed), number, now)
            heard(sample)
            samples.append(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, plan.requests)):
            group.create_task(user())
    return samples
