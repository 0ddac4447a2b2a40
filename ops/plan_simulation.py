"""One replica under Poisson arrivals, step by step: the cross-check of the closed form.

Continuous batching as the engine does it: first come first served, a budget of prompt tokens beside decoding, a random
number of accepted drafts for each request. A step takes what the roofline says; only the queueing is simulated.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ops.plan_capacity import Load
from ops.plan_roofline import Model
from ops.plan_rounds import Drafting, best_round, round_of

_WARM_UP = 0.2  # of the requests, which see an empty replica
_GRAIN = 64  # positions; contexts are rounded to it, so that step times can be looked up


@dataclass
class _Request:
    arrived: float
    prompt_left: int
    produced: int = 0
    first_at: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """Seconds, requests a second and tokens a second of the requests after the warm-up; sorted samples."""

    ttft: list[float]
    itl: list[float]  # of each request: first to last token, a token after the first
    tokens_rate: float
    batch: float  # mean over time, requests in decoding
    busy: float  # share of the time in steps
    steps: int


def simulate(
    target: Model, drafting: Drafting, load: Load, rate: float, *, max_batch: int, requests: int, seed: int
) -> Simulated:
    """`rate` requests a second at one replica that decodes at most `max_batch` together."""
    chance = random.Random(seed)

    @cache
    def round_at(batch: int, prompt: int, context: int) -> tuple[int, float]:
        gamma = best_round(target, drafting, batch, load.context).gamma if batch else 0
        return gamma, round_of(target, drafting, batch, gamma, context, prompt).seconds

    arrivals = deque(_arrivals(chance, rate, requests))
    waiting: deque[_Request] = deque()
    running: list[_Request] = []
    done: list[tuple[_Request, float]] = []
    now = busy = batch_seconds = 0.0
    steps = 0
    while len(done) < requests:
        while arrivals and arrivals[0] <= now:
            waiting.append(_Request(arrivals.popleft(), load.prompt))
        while waiting and len(running) < max_batch:
            running.append(waiting.popleft())
        if not running:
            now = arrivals[0]
            continue
        decoding = [request for request in running if not request.prompt_left]
        read = _read_prompts(running, load.chunk)
        context = sum(load.prompt + request.produced for request in decoding) / max(len(decoding), 1)
        gamma, seconds = round_at(len(decoding), read, round(max(context, load.prompt) / _GRAIN) * _GRAIN)
        now, busy, steps = now + seconds, busy + seconds, steps + 1
        batch_seconds += seconds * len(decoding)
        for request in decoding:
            request.produced += _tokens(chance, drafting.alpha, gamma)
        for request in running:
            if not request.prompt_left and not request.produced:
                request.produced, request.first_at = 1, now
        done += [(request, now) for request in running if request.produced >= load.output]
        running = [request for request in running if request.produced < load.output]
    return _summary(done, load, now, busy, batch_seconds, steps)


def _arrivals(chance: random.Random, rate: float, requests: int) -> list[float]:
    times, now = [], 0.0
    for _ in range(requests):
        now += chance.expovariate(rate)
        times.append(now)
    return times


def _read_prompts(running: Sequence[_Request], budget: int) -> int:
    """Gives the budget to prompts in order of arrival; returns the rows."""
    left = budget
    for request in running:
        taken = min(request.prompt_left, left)
        request.prompt_left -= taken
        left -= taken
    return budget - left


def _tokens(chance: random.Random, alpha: float, gamma: int) -> int:
    accepted = 0
    while accepted < gamma and chance.random() < alpha:
        accepted += 1
    return accepted + 1


def _summary(
    done: list[tuple[_Request, float]], load: Load, now: float, busy: float, batch_seconds: float, steps: int
) -> Simulated:
    measured = sorted(done, key=lambda item: item[0].arrived)[int(len(done) * _WARM_UP) :]
    first = min(request.arrived for request, _ in measured)
    return Simulated(
        ttft=sorted(request.first_at - request.arrived for request, _ in measured),
        itl=sorted((end - request.first_at) / max(load.output - 1, 1) for request, end in measured),
        tokens_rate=len(measured) * load.output / (max(end for _, end in measured) - first),
        batch=batch_seconds / now,
        busy=busy / now,
        steps=steps,
    )
