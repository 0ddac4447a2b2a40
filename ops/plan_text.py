"""An answer as Markdown, every figure with the arithmetic that it comes from. Computes nothing but what it shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isinf

from ops.percentiles import percentile
from ops.plan_answer import Answer, Crosscheck, Curve
from ops.plan_capacity import Capacity, Point
from ops.plan_rounds import BATCHES, SERVED, Kind
from ops.plan_shape import BYTES

_NAMES: dict[Kind, str] = {
    "none": "plain decoding",
    "ngram": "n-gram",
    "eagle3": "EAGLE-3 head",
    "model": "draft model",
}


def render(answer: Answer, price: float | None) -> str:
    """`price` is what one device costs an hour."""
    parts = [
        _verdict(answer, price),
        _question(answer),
        _model(answer),
        _memory(answer),
        _step(answer),
        *(_curve(curve) for curve in answer.curves),
        _compared(answer, price),
    ]
    if answer.chosen.point is not None:
        parts.append(_replicas(answer, answer.chosen.point, price))
    if answer.check is not None:
        parts.append(_check(answer, answer.check))
    parts.append(_assumed(answer))
    return "\n\n".join(parts) + "\n"


def _verdict(answer: Answer, price: float | None) -> str:
    question, device = answer.question, answer.model.device
    load, kind = question.load, answer.chosen.drafting.kind
    lines = [f"# {load.qps:,g} requests a second of {question.target.name} on {question.device.name}", ""]
    if answer.refusal:
        lines += [f"**Not servable by this release**: {answer.refusal}.", ""]
    if answer.chosen.point is None:
        lines.append(f"No number of replicas meets this: {answer.chosen.why}.")
        return "\n".join(lines)
    group = f" of {device.count} devices each (hypothetical)" if device.count > 1 else ""
    cost = f", {answer.devices * price:,.0f} an hour" if price is not None else ""
    lines.append(
        f"**{answer.chosen.replicas:,} replicas{group}, {answer.devices:,} devices{cost}**, with {_NAMES[kind]}"
        + (f" at α = {answer.chosen.drafting.alpha:g}." if kind != "none" else ".")
    )
    if kind not in SERVED:
        lines.append(f"(This release has no {_NAMES[kind]} drafter: the figures are for comparison.)")
    return "\n".join(lines)


def _question(answer: Answer) -> str:
    question = answer.question
    load, goal, device = question.load, question.goal, question.device
    goals = [
        f"{name} at most {value:g} s" for name, value in (("TTFT", goal.ttft), ("ITL", goal.itl)) if not isinf(value)
    ]
    return _list(
        "## What was asked",
        [
            f"load: {load.qps:,g} requests/s, prompt P = {load.prompt:,} and output O = {load.output:,} tokens, so "
            f"{load.qps * load.output:,.0f} output tokens/s and a mean context of P + O/2 = {load.context:,.0f}",
            f"goals: {', '.join(goals) or 'none'}; replicas are planned to {load.utilisation:.0%} of what they can do",
            f"device: {device.name}, {device.origin}; so {device.bandwidth / 1e9:,.0f} GB/s and "
            f"{device.flops / 1e12:,.4g} TFLOP/s",
            f"engine: weights in {question.weights}, at most {question.max_batch} requests a batch, "
            f"C = {load.chunk:,} prompt tokens a step (engine.prefill_tokens), gamma up to {question.gamma_max}",
        ],
    )


def _model(answer: Answer) -> str:
    shape = answer.question.target
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * shape.hidden * queries + 2 * shape.hidden * keys + 3 * shape.hidden * shape.intermediate
    lines = []
    if layer * shape.layers == shape.body:
        lines.append(
            f"a layer: q and o 2 × {shape.hidden:,} × {queries:,}, k and v 2 × {shape.hidden:,} × {keys:,}, MLP "
            f"3 × {shape.hidden:,} × {shape.intermediate:,}: {layer:,} weights; × {shape.layers} = {shape.body:,}"
        )
    else:
        lines.append(f"matrices of {shape.layers} layers, as counted: {shape.body:,} weights")
    if shape.experts:
        lines.append(
            f"experts: {shape.experts:,} weights, of which a token uses {shape.experts_used} of {shape.expert_count}"
        )
    lines.append(
        f"output head: {shape.vocab:,} × {shape.hidden:,} = {shape.head:,}"
        + (", tied to the embedding table" if shape.tied else f"; embedding table {shape.table:,}")
    )
    lines.append(f"with norms and biases ({shape.small:,}): **{shape.parameters:,} parameters**")
    width = answer.model.kv_width
    lines.append(
        f"KV of a token: 2 × {shape.layers} layers × {shape.kv_heads} heads × {shape.head_dim} × {width} bytes = "
        f"{shape.kv_bytes(width):,} bytes"
    )
    return _list(f"## The model, from its config ({shape.name})", lines)


def _memory(answer: Answer) -> str:
    question, chosen, device = answer.question, answer.chosen, answer.model.device
    memory, drafter, load = chosen.memory, chosen.drafting.drafter, answer.question.load
    share = question.memory_share
    lines = []
    if answer.refusal and device.count > 1:
        one = answer.single
        lines.append(
            f"one {question.device.name}: {question.device.memory / 1e9:,.0f} GB × {share:g} = "
            f"{one.usable / 1e9:,.1f} GB, less weights {one.weights / 1e9:,.2f} GB = {one.room / 1e9:,.2f} GB: "
            f"**it does not fit**; below, {device.count} devices count as one, and nothing is charged for talking"
        )
    lines += [
        f"usable: {device.memory / 1e9:,.0f} GB × {share:g} = {memory.usable / 1e9:,.1f} GB",
        f"weights: {question.target.parameters:,} × {BYTES[question.weights]} bytes"
        + (" (embedding table in fp32)" if device.on_cpu else "")
        + f" = {memory.weights / 1e9:,.2f} GB",
    ]
    if drafter is not None:
        lines.append(f"drafter ({_NAMES[chosen.drafting.kind]}): {memory.drafter / 1e9:,.2f} GB")
        lines.append(f"its KV: {drafter.kv_token:,} bytes a token, so {memory.token:,} in all")
    lines.append(
        f"KV of a sequence: (P + O) × {memory.token:,} = {load.prompt + load.output:,} × {memory.token:,} bytes = "
        f"{memory.sequence / 1e6:,.1f} MB"
    )
    lines.append(
        f"room for KV: {memory.room / 1e9:,.2f} GB, so **{memory.sequences:,} sequences**"
        + (f"; batches up to {question.max_batch} are planned" if memory.sequences > question.max_batch else "")
    )
    return _list("## Memory of a replica", lines)


def _step(answer: Answer) -> str:
    model, load = answer.model, answer.question.load
    shape, device, width = model.shape, model.device, BYTES[model.weights]
    rows = []
    for count in (1, 4, 8, 16, 32, 64, 128, 256, 512):
        step = model.step(count, load.context, count)
        rows.append(
            [f"{count}", _ms(step.body), _ms(step.attention), _ms(step.head), _ms(step.calls), _ms(step.seconds)]
        )
    lines = [
        f"reading all layers once: {shape.read(1) * width / 1e9:,.3f} GB / {device.bandwidth / 1e9:,.0f} GB/s = "
        f"{_ms(shape.read(1) * width / device.bandwidth)} ms, whatever the rows",
        f"arithmetic: 2 × {shape.active:,.0f} / {device.flops / 1e12:,.4g} TFLOP/s = "
        f"{2 * shape.active / device.flops * 1e3:,.4f} ms a row, so reading hides up to "
        f"{device.ridge * width:,.0f} rows",
        f"attention: {model.kv_token:,} bytes × {load.context:,.0f} positions a sequence"
        ", read for each sequence once however many rows it has",
    ]
    if device.calls.any:
        lines.append(
            f"calls: {model.calls.linears:,} linears, {model.calls.ops:,} other operations and {model.calls.views:,} "
            f"views, counted from the config, at the cost of each as measured on this machine"
        )
    return (
        _list("## A step without drafts, by the roofline", lines)
        + "\n\n"
        + table(["rows", "layers ms", "attention ms", "head and logits ms", "calls ms", "step ms"], rows)
    )


def _curve(curve: Curve) -> str:
    kind, alpha = curve.drafting.kind, curve.drafting.alpha
    rows = []
    for batch, plain, best in zip(curve.batches, curve.plain, curve.best, strict=True):
        gain = plain.token_seconds / best.token_seconds
        rows.append(
            [
                f"{batch}", f"{best.gamma}", f"{best.tokens:.2f}", _ms(best.draft), _ms(best.verify),
                _ms(best.token_seconds), _ms(plain.token_seconds), f"{gain:.2f}×",
            ]
        )  # fmt: skip
    if curve.pays_until >= BATCHES:
        end = f"It pays at every batch up to {BATCHES:,}, as far as was looked."
    elif curve.pays_until:
        end = f"It **stops paying above a batch of {curve.pays_until}**."
    else:
        end = "It **never pays** here."
    example = curve.best[0]
    terms = " + ".join(["1", *(f"{alpha:g}" if n == 1 else f"{alpha:g}^{n}" for n in range(1, example.gamma + 1))])
    lines = [
        f"## {_NAMES[kind][0].upper()}{_name(kind)[1:]}, α = {alpha:g}",
        "",
        f"Tokens a round at gamma {example.gamma}: {terms} = {example.tokens:.3f}. {end}",
        "",
        table(
            ["batch", "best gamma", "tokens a round", "draft ms", "verify ms", "ms a token", "plain ms", "gain"], rows
        ),
    ]
    return "\n".join(lines)


def _compared(answer: Answer, price: float | None) -> str:
    count = answer.model.device.count
    head = ["way to draft", "α", "sequences that fit", "batch", "gamma", "ITL ms", "TTFT s", "requests/s", "replicas",
            "devices"]  # fmt: skip
    if price is not None:
        head.append("cost an hour")
    rows = []
    for capacity in answer.capacities:
        rows.append(_row(capacity, count, price))
    note = "TTFT is without queueing; requests/s are of one replica at full use."
    return "\n".join(["## Ways to draft compared", "", note, "", table(head, rows)])


def _row(capacity: Capacity, count: int, price: float | None) -> list[str]:
    kind, point = capacity.drafting.kind, capacity.point
    alpha = f"{capacity.drafting.alpha:g}" if kind != "none" else ""
    cells = [_name(kind), alpha, f"{capacity.memory.sequences:,}"]
    if point is None:
        return [*cells, capacity.why, *[""] * (7 if price is not None else 6)]
    cells += [f"{point.batch}", f"{point.round.gamma}", _ms(point.itl), f"{point.ttft:.2f}", f"{point.rate:.3f}"]
    cells += [f"{capacity.replicas:,}", f"{capacity.replicas * count:,}"]
    return cells if price is None else [*cells, f"{capacity.replicas * count * price:,.0f}"]


def _name(kind: Kind) -> str:
    return _NAMES[kind] if kind in SERVED else f"{_NAMES[kind]} (not in this release)"


def _replicas(answer: Answer, point: Point, price: float | None) -> str:
    load, alone, mixed = answer.question.load, point.round, point.mixed
    rounds = load.output / (alone.tokens * point.batch)
    plain = max(rounds - load.chunks, 0)
    lines = [
        f"batch B = {point.batch}, gamma {alone.gamma}: a round yields E = {alone.tokens:.3f} tokens a request and "
        f"takes {_ms(alone.draft)} + {_ms(alone.verify)} = {_ms(alone.seconds)} ms; beside {load.chunk:,} prompt rows "
        f"{_ms(mixed.seconds)} ms",
        f"a request is O / (E × B) = {load.output:,} / ({alone.tokens:.3f} × {point.batch}) = {rounds:.3f} rounds and "
        f"P / C = {load.chunks:.3f} prompt steps",
        f"replica time a request: {load.chunks:.3f} × {_ms(mixed.seconds)} + {plain:.3f} × {_ms(alone.seconds)} = "
        f"{_ms(point.request_seconds)} ms, so {point.rate:.3f} requests/s and {point.rate * load.output:,.0f} tokens/s",
        f"ITL: {_ms(point.request_seconds)} ms / max({rounds:.3f}, {load.chunks:.3f}) steps / {alone.tokens:.3f} "
        f"tokens = {_ms(point.itl)} ms; TTFT: max({load.chunks:.3f}, 1) × {_ms(mixed.seconds)} + "
        f"{_ms(alone.seconds)} / 2 = {point.ttft * 1e3:,.0f} ms",
        f"replicas: {load.qps:,g} / ({load.utilisation:g} × {point.rate:.3f}) → **{answer.chosen.replicas:,}**"
        + (f", × {answer.model.device.count} devices = {answer.devices:,}" if answer.model.device.count > 1 else "")
        + (
            f"; {answer.devices:,} × {price:g} = **{answer.devices * price:,.0f} an hour**" if price is not None else ""
        ),
    ]
    return _list(f"## Replicas, with {_NAMES[answer.chosen.drafting.kind]}", lines)


def _check(answer: Answer, check: Crosscheck) -> str:
    found, load = check.simulated, answer.question.load
    rate = check.rate * load.output
    rows = [
        ["requests in decoding", f"{check.batch:.1f}", f"{found.batch:.1f}"],
        ["ITL, mean ms", _ms(check.itl), _ms(sum(found.itl) / len(found.itl))],
        ["ITL, p99 ms", "", _ms(percentile(found.itl, 0.99))],
        ["TTFT, p50 s", f"{check.ttft:.3f} without queueing", f"{percentile(found.ttft, 0.5):.3f}"],
        ["TTFT, p99 s", "", f"{percentile(found.ttft, 0.99):.3f}"],
        ["tokens/s", f"{rate:,.0f}", f"{found.tokens_rate:,.0f}"],
    ]
    said = (
        f"One replica at its share of {check.rate:.3f} requests/s, Poisson arrivals, {len(found.itl):,} requests after "
        f"the warm-up, {found.steps:,} steps."
    )
    return "\n".join(["## Simulated", "", said, "", table(["", "closed form", "simulated"], rows)])


def _assumed(answer: Answer) -> str:
    lines = [
        "positions are accepted independently with chance α; prompts and outputs all have the given lengths; no prefix "
        "is shared",
        "replicas share the load evenly; the roofline's parts follow one another",
    ]
    if answer.model.device.count > 1:
        lines.append("the devices of a group work as one, and nothing is charged for what they say to each other")
    if not answer.model.device.on_cpu:
        lines.append("launches cost nothing (CUDA graphs)")
    return _list("## Assumed", lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _list(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        for row in rows:
            yield "| " + " | ".join(row) + " |"

    return "\n".join(lines())
