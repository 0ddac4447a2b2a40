"""From a question to the whole answer: capacities of every way to draft, servable or not, and a simulation if asked.

Where one device does not hold the model, this release cannot serve it; the same arithmetic is then done for several
devices as if they were one, without charge for talking to each other, and called hypothetical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ops.plan_calls import NO_CALLS, Calls
from ops.plan_capacity import Capacity, Goal, Load, Memory, capacity_of, memory_of, working_batch
from ops.plan_device import Device
from ops.plan_roofline import Model
from ops.plan_rounds import KINDS, SERVED, Drafting, Kind, Round, best_round, draftings, pays_until, round_of
from ops.plan_shape import ModelShape
from ops.plan_simulation import Simulated, simulate

_MOST_DEVICES = 64  # of a hypothetical group
_CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Question:
    """Everything that the answer depends on."""

    target: ModelShape
    weights: str
    device: Device
    load: Load
    goal: Goal
    alphas: dict[Kind, float]
    gamma_max: int = 4
    draft_vocab: int = 32000
    draft_model: ModelShape | None = None
    memory_share: float = 0.9
    max_batch: int = 256
    kinds: tuple[Kind, ...] = KINDS
    calls: Calls = NO_CALLS
    draft_calls: Calls = NO_CALLS

    def model(self, device: Device) -> Model:
        return Model(self.target, self.weights, device, self.calls)

    def draftings(self, device: Device) -> list[Drafting]:
        shape = self.draft_model
        model = Model(shape, self.weights, device, self.draft_calls) if shape else None
        return draftings(
            self.model(device),
            self.alphas,
            gamma_max=self.gamma_max,
            draft_vocab=self.draft_vocab,
            draft_model=model,
            kinds=self.kinds,
        )


@dataclass(frozen=True)
class Curve:
    """The best round of one way to draft, by batch, beside plain rounds; and where it stops paying."""

    drafting: Drafting
    batches: tuple[int, ...]
    plain: tuple[Round, ...]
    best: tuple[Round, ...]
    pays_until: int


@dataclass(frozen=True)
class Crosscheck:
    """One replica at the rate that the plan gives it: what the closed form says, and what happened."""

    rate: float  # requests a second
    batch: float  # in decoding, by the closed form
    itl: float
    ttft: float  # by the closed form, without queueing
    simulated: Simulated


@dataclass(frozen=True)
class Answer:
    question: Question
    refusal: str  # why this release cannot serve it; empty: it can
    model: Model  # on the device or group that the capacities are for
    single: Memory  # of one device with the chosen way to draft
    capacities: tuple[Capacity, ...]
    curves: tuple[Curve, ...]
    chosen: Capacity
    check: Crosscheck | None

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.chosen.replicas * self.model.device.count


def answer(question: Question, *, drafter: Kind | None = None, simulated_requests: int = 0, seed: int = 0) -> Answer:
    """`drafter` is the way to draft that is worked out; by default the served one with the fewest replicas."""
    refusal = _refusal(question)
    model, capacities = _capacities(question, refusal)
    served = [capacity for capacity in capacities if capacity.drafting.kind in SERVED]
    able = [capacity for capacity in served if capacity.point is not None] or served
    wanted = [capacity for capacity in capacities if capacity.drafting.kind == drafter]
    chosen = wanted[0] if wanted else min(able, key=_order)
    context = question.load.context
    curves = tuple(_curve(model, capacity.drafting, context) for capacity in capacities if capacity.drafting.alpha)
    check = _check(model, chosen, question, simulated_requests, seed) if simulated_requests and chosen.point else None
    single = memory_of(question.model(question.device), _same(question, chosen), question.load, question.memory_share)
    return Answer(question, refusal, model, single, tuple(capacities), curves, chosen, check)


def _refusal(question: Question) -> str:
    target, load = question.target, question.load
    if target.problem:
        return f"{target.name} cannot be served on any device: {target.problem}"
    if load.prompt + load.output > target.max_positions:
        return f"{load.prompt} + {load.output} tokens are more than the model's {target.max_positions} positions"
    plain = Drafting("none", 0.0)
    memory = memory_of(question.model(question.device), plain, load, question.memory_share)
    if not memory.sequences:
        return (
            f"{target.name} in {question.weights} needs {memory.weights / 1e9:.1f} GB for its weights and "
            f"{memory.sequence / 1e9:.2f} GB for one sequence; of one {question.device.name} "
            f"{memory.usable / 1e9:.1f} GB can be used, and a model is served from one device (no tensor parallelism)"
        )
    return ""


def _capacities(question: Question, refusal: str) -> tuple[Model, list[Capacity]]:
    single = question.model(question.device)
    found = _on(question, question.device)
    if not refusal or any(capacity.memory.sequences for capacity in found):
        return single, found
    groups: list[tuple[Model, list[Capacity]]] = []
    count = 2
    while count <= _MOST_DEVICES and len(groups) < 4:  # a group twice the smallest often needs fewer devices in all
        device = question.device.times(count)
        found = _on(question, device)
        if any(capacity.point is not None for capacity in found):
            groups.append((question.model(device), found))
        count *= 2
    if not groups:
        return single, found
    return min(groups, key=lambda group: min(_order(c)[0] for c in group[1]) * group[0].device.count)


def _on(question: Question, device: Device) -> list[Capacity]:
    return [
        capacity_of(
            question.model(device),
            drafting,
            question.load,
            question.goal,
            memory_share=question.memory_share,
            max_batch=question.max_batch,
        )
        for drafting in question.draftings(device)
    ]


def _order(capacity: Capacity) -> tuple[float, float]:
    point = capacity.point
    return (capacity.replicas, point.itl) if point is not None else (float("inf"), 0.0)


def _same(question: Question, chosen: Capacity) -> Drafting:
    """The chosen way to draft, on one device."""
    return next(d for d in question.draftings(question.device) if d.kind == chosen.drafting.kind)


def _curve(model: Model, drafting: Drafting, context: float) -> Curve:
    none = replace(drafting, kind="none")
    return Curve(
        drafting,
        _CURVE,
        tuple(round_of(model, none, batch, 0, context) for batch in _CURVE),
        tuple(best_round(model, drafting, batch, context) for batch in _CURVE),
        pays_until(model, drafting, context),
    )


def _check(model: Model, chosen: Capacity, question: Question, requests: int, seed: int) -> Crosscheck:
    assert chosen.point is not None, "checked by the caller"
    load, most = question.load, chosen.point.batch
    rate = load.qps / chosen.replicas
    batch = working_batch(model, chosen.drafting, load, rate, most)
    itl = batch / (rate * load.output)
    gamma = best_round(model, chosen.drafting, batch, load.context).gamma
    mixed = round_of(model, chosen.drafting, batch, gamma, load.context, prompt=load.chunk)
    alone = round_of(model, chosen.drafting, batch, gamma, load.context)
    ttft = max(load.chunks, 1) * mixed.seconds + alone.seconds / 2
    found = simulate(model, chosen.drafting, load, rate, max_batch=most, requests=requests, seed=seed)
    return Crosscheck(rate, batch, itl, ttft, found)
