"""The one training loop: distils stored target distributions into a drafter, all its parameters or only its LoRA.

Whatever requires a gradient is trained; the shared token embedding never does. Given the seed, the same examples and
the same thread count, two runs end with the same bits. It knows nothing of where examples come from or who judges.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from learner.example import Batch, Example, pack, plan_epoch, row_count, wanted_positions
from learner.losses import LossKind, distil, row_targets
from learner.unroll import DepthRows, Drafter, column_index, shift_of, unroll

# Logits projected and back-propagated together; each time costs a pass over the output layer's gradient.
_LOGITS_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class TrainSettings:
    learning_rate: float = 1e-3
    batch_tokens: int = 1024  # positions learnt from in one optimiser step
    epochs: float = 1.0  # passes over the examples; the last may be partial
    steps: int = 0  # optimiser steps; not 0: instead of `epochs`
    loss: LossKind = "forward_kl"
    ttt_steps: int = 3  # draft depths unrolled; a language model has one
    depth_decay: float = 0.8  # weight of a depth relative to the one before
    rejected_weight: float = 1.0  # of positions where a draft was rejected, others weigh 1
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_rows: int = 2048  # longer examples lose rows from the left
    bf16: bool = False  # autocast: about twice as fast where the CPU has AVX512-BF16 or AMX
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    step: int  # finished steps
    steps: int
    tokens: int
    seconds: float
    loss: float  # of this step, decayed mean over depths
    overlap: tuple[float, ...]  # by depth, of this step


@dataclass(frozen=True)
class TrainReport:
    steps: int
    tokens: int  # positions learnt from, repeats counted
    seconds: float
    loss_first: float  # mean over the first tenth of the steps
    loss_last: float  # over the last tenth
    overlap_last: tuple[float, ...]  # by depth over the last tenth: a lower bound of alpha at temperature 1
    lost: float  # mean target probability outside the draft vocabulary or the stored ids
    skipped: int  # examples without anything to learn from
    losses: tuple[float, ...] = field(default=(), repr=False)  # of every step


def train(
    drafter: Drafter,
    examples: Sequence[Example],
    *,
    settings: TrainSettings,
    progress: Callable[[Progress], None] | None = None,
) -> TrainReport:
    """Trains in place with AdamW, warm-up and cosine decay; `progress` is called after each step and may raise to stop.

    `examples` may load lazily: all are looked at once for their sizes, then again batch by batch.
    """
    started = time.monotonic()
    shift = shift_of(drafter)
    sizes = [_size(example, shift, settings.max_rows) for example in examples]
    plan = _plan(sizes, settings)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, len(plan), settings.warmup))
    column_of = column_index(drafter)
    device = next(drafter.parameters()).device
    tokens = 0
    lost: list[float] = []
    losses: list[float] = []
    overlaps: list[tuple[float, ...]] = []
    drafter.train()
    with _frozen_linears_rounded(drafter) if settings.bf16 else nullcontext():
        for step, indices in enumerate(plan, start=1):
            batch = pack([examples[i] for i in indices], shift=shift, max_rows=settings.max_rows).to(device)
            optimizer.zero_grad(set_to_none=True)
            result = _backward(drafter, batch, column_of, settings)
            nn.utils.clip_grad_norm_(trained, settings.grad_clip)
            optimizer.step()
            schedule.step()
            tokens += len(batch.row)
            losses.append(result.loss)
            overlaps.append(result.overlap)
            lost.append(result.lost)
            if progress is not None:
                progress(Progress(step, len(plan), tokens, time.monotonic() - started, result.loss, result.overlap))
    drafter.eval()
    optimizer.zero_grad(set_to_none=True)
    tenth = max(len(plan) // 10, 1)
    return TrainReport(
        steps=len(plan),
        tokens=tokens,
        seconds=time.monotonic() - started,
        loss_first=_mean(losses[:tenth]),
        loss_last=_mean(losses[-tenth:]),
        overlap_last=tuple(_mean(list(depth)) for depth in zip(*overlaps[-tenth:], strict=True)),
        lost=_mean(lost),
        skipped=sum(1 for _, wanted in sizes if not wanted),
        losses=tuple(losses),
    )


@contextmanager
def _frozen_linears_rounded(drafter: nn.Module) -> Iterator[None]:
    """Weights that nobody trains are bf16 meanwhile: autocast would round each of them anew in every single call."""
    frozen = [module for module in drafter.modules() if type(module) is nn.Linear and not module.weight.requires_grad]
    exact = [module.weight.data for module in frozen]
    try:
        for module in frozen:
            module.weight.data = module.weight.data.bfloat16()
        yield
    finally:
        for module, weight in zip(frozen, exact, strict=True):
            module.weight.data = weight


def _size(example: Example, shift: int, max_rows: int) -> tuple[int, int]:  # (rows, wanted rows) after the cut
    rows = row_count(example.record, shift)
    cut = max(rows - max_rows, 0)
    first = len(example.record.prompt_ids) - 1 - shift
    wanted = int((wanted_positions(example.record, judging=False) + first >= cut).sum())
    return rows - cut, wanted


def _plan(sizes: Sequence[tuple[int, int]], settings: TrainSettings) -> list[list[int]]:
    """The batches of the whole training, pass after pass."""
    order = random.Random(settings.seed)
    plan = plan_epoch(sizes, settings.batch_tokens, order)
    if not plan:
        return []
    steps = settings.steps or max(round(settings.epochs * len(plan)), 1)
    while len(plan) < steps:
        plan.extend(plan_epoch(sizes, settings.batch_tokens, order))
    return plan[:steps]


def _rate(step: int, steps: int, warmup: float) -> float:
    """Linear from 0 over the warm-up, then half a cosine down to a twentieth."""
    rising = max(round(warmup * steps), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1))) / 2


@dataclass(frozen=True)
class _StepResult:
    loss: float
    overlap: tuple[float, ...]
    lost: float


def _backward(drafter: Drafter, batch: Batch, column_of: Tensor | None, settings: TrainSettings) -> _StepResult:
    """Adds one batch's gradient.

    Projection and loss go through a few rows at a time, each back-propagated at once down to its hidden rows; the
    layers below follow in one pass with the collected gradients. That is the plain gradient, in less memory.
    """
    ids = batch.topk_ids if column_of is None else batch.topk_ids.clamp_max(len(column_of) - 1)
    targets = row_targets(ids, batch.topk_logprobs, column_of)
    # A row counts as much as it can win: mass outside the draft vocabulary is lost whatever is learnt.
    weight = targets.kept * torch.where(batch.rejected, settings.rejected_weight, 1.0)  # [m]
    device = weight.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=settings.bf16):
        depths = unroll(drafter, batch, settings.ttt_steps)
    decay = [settings.depth_decay**k for k in range(len(depths))]
    total, overlaps, grads = 0.0, [], []
    for depth, share in zip(depths, decay, strict=True):
        scale = share / sum(decay) / max(len(depth.picks), 1)
        leaf = depth.hidden.detach().requires_grad_()
        loss_sum = overlap_sum = 0.0
        for chunk in _chunks(depth):
            rows = depth.picks[chunk]
            with torch.autocast(device, dtype=torch.bfloat16, enabled=settings.bf16):
                logits = depth.project(leaf[chunk])
            result = distil(logits, targets.take(rows), settings.loss)
            loss = (result.loss * weight[rows]).sum()
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            overlap_sum += float(result.overlap.sum())
        total += loss_sum * scale
        overlaps.append(overlap_sum / max(len(depth.picks), 1))
        grads.append(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
    torch.autograd.backward([depth.hidden for depth in depths], grads)
    return _StepResult(total, tuple(overlaps), float(1.0 - targets.kept.mean()))


def _chunks(depth: DepthRows) -> list[slice]:
    size = max(_LOGITS_AT_ONCE // depth.vocab, 16)
    return [slice(first, first + size) for first in range(0, len(depth.picks), size)]


def bf16_pays(device: torch.device) -> bool:
    """Whether `TrainSettings.bf16` is faster here: measured at twice the tokens a second with AVX512-BF16."""
    if device.type != "cpu":
        return True
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
