"""What one replica carries: memory for weights and sequences, the batch that meets the goals, requests a second.

A replica spends on each request O/(E·B) rounds of decoding, its share in a batch of B, and P/C steps that read a chunk
of the prompt beside a round. From there come its rate, the latencies (Little's law) and the number of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from ops.plan_roofline import Model
from ops.plan_rounds import BATCHES, Drafting, Round, best_round, round_of


@dataclass(frozen=True)
class Load:
    qps: float  # requests a second
    prompt: int  # tokens
    output: int
    chunk: int  # prompt tokens that a step reads beside decoding (engine.prefill_tokens)
    utilisation: float  # of a replica's rate that is planned for: the rest absorbs bursts

    @property
    def context(self) -> float:
        """Mean positions that a decoding request attends to."""
        return self.prompt + self.output / 2

    @property
    def chunks(self) -> float:
        """Steps that read a prompt; chunks of several prompts share a step."""
        return self.prompt / self.chunk


@dataclass(frozen=True)
class Goal:
    """Most seconds to the first token and between tokens, on average."""

    ttft: float = inf
    itl: float = inf


@dataclass(frozen=True)
class Memory:
    """Bytes of one replica. `sequences` is how many fit whole, prompt and output."""

    usable: float
    weights: int
    drafter: int
    token: int  # KV of one token, drafter's included
    sequence: int

    @property
    def room(self) -> float:
        return self.usable - self.weights - self.drafter

    @property
    def sequences(self) -> int:
        return max(int(self.room // self.sequence), 0)


@dataclass(frozen=True)
class Point:
    """A replica at full use of a batch."""

    batch: int
    round: Round
    mixed: Round  # a round beside a chunk of prompt
    request_seconds: float  # of the replica, for one request
    itl: float  # seconds between tokens
    ttft: float  # without waiting in a queue

    @property
    def rate(self) -> float:
        """Requests a second."""
        return 1 / self.request_seconds


@dataclass(frozen=True)
class Capacity:
    """One way to draft under one load. `point` is None when no batch fits or none meets the goals."""

    drafting: Drafting
    memory: Memory
    point: Point | None
    replicas: int
    why: str = ""


def memory_of(target: Model, drafting: Drafting, load: Load, share: float) -> Memory:
    """`share` of the device is planned with; the rest is for activations, graphs and fragments."""
    drafter = drafting.drafter
    token = target.kv_token + (drafter.kv_token if drafter else 0)
    return Memory(
        usable=target.device.memory * share,
        weights=target.bytes,
        drafter=drafter.bytes if drafter else 0,
        token=token,
        sequence=token * (load.prompt + load.output),
    )


def point_at(target: Model, drafting: Drafting, load: Load, batch: int) -> Point:
    """The best gamma for this batch and what follows from it."""
    gammas = range(drafting.gamma_max + 1 if drafting.kind != "none" else 1)
    points = [_point(target, drafting, load, batch, gamma) for gamma in gammas]
    return min(points, key=lambda point: point.request_seconds)


def _point(target: Model, drafting: Drafting, load: Load, batch: int, gamma: int) -> Point:
    alone = round_of(target, drafting, batch, gamma, load.context)
    mixed = round_of(target, drafting, batch, gamma, load.context, prompt=load.chunk)
    rounds = load.output / (alone.tokens * batch)
    # Where prompts need more steps than decoding does, every step reads a chunk, and the batch is never full.
    seconds = load.chunks * mixed.seconds + max(rounds - load.chunks, 0) * alone.seconds
    itl = seconds / max(rounds, load.chunks) / alone.tokens
    ttft = max(load.chunks, 1) * mixed.seconds + alone.seconds / 2
    return Point(batch, alone, mixed, seconds, itl, ttft)


def capacity_of(
    target: Model, drafting: Drafting, load: Load, goal: Goal, *, memory_share: float, max_batch: int = BATCHES
) -> Capacity:
    """The batch with the highest rate among those that fit and meet both goals."""
    memory = memory_of(target, drafting, load, memory_share)
    most = min(memory.sequences, max_batch, BATCHES)
    if not most:
        return Capacity(drafting, memory, None, 0, "not one sequence fits beside the weights")
    points = [point_at(target, drafting, load, batch) for batch in range(1, most + 1)]
    meeting = [point for point in points if point.itl <= goal.itl and point.ttft <= goal.ttft]
    if not meeting:
        quick = min(points, key=lambda point: point.itl)
        best = f"{quick.itl * 1e3:.1f} ms between tokens and {min(p.ttft for p in points):.2f} s to the first"
        return Capacity(drafting, memory, None, 0, f"no batch meets the goals: the best are {best}")
    point = max(meeting, key=lambda point: point.rate)
    return Capacity(drafting, memory, point, ceil(load.qps / (load.utilisation * point.rate)))


def working_batch(target: Model, drafting: Drafting, load: Load, rate: float, most: int) -> float:
    """Requests in decoding at `rate` a second (Little's law: the batch at which rate times time is itself)."""
    low, high = 0.0, float(most)
    for _ in range(40):
        batch = (low + high) / 2
        alone = best_round(target, drafting, batch, load.context)
        mixed = round_of(target, drafting, batch, alone.gamma, load.context, prompt=load.chunk)
        busy = rate * load.chunks * mixed.seconds  # share of the time that reads prompts
        steps = rate * load.chunks + max(1 - busy, 0) / alone.seconds  # a second
        if rate * load.output > batch * steps * alone.tokens:
            low = batch
        else:
            high = batch
    return (low + high) / 2
