"""This machine's own figures for the planner: read bandwidth, FLOP/s, what a call costs. Never the engine or a model.

Reading is timed with one-row products over matrices as large together as the model's weights, arithmetic with many
rows of one matrix, calls with operands too small to matter; all by the linear layers of the weight format, since the
kernel decides what of the memory's speed is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import cast

import psutil
import torch
from torch import nn

from ops.plan_device import GB, TERA, CallCosts, Device
from ops.plan_shape import BYTES
from shared.models.linears import WeightKind, pack_linears

_WIDTH = 1024  # of the matrices: 2 MB in fp16
_LEAST_BYTES, _MOST_BYTES = 64 * 2**20, 2**30  # read in one pass
_MANY_ROWS = 64
_REPEATS = 7
_CALLS = 300


def measure_cpu(weights: str, read_bytes: float) -> Device:
    """The CPU as a device, with torch's present number of threads; `read_bytes` is what a step of the model reads."""
    count = round(min(max(read_bytes, _LEAST_BYTES), _MOST_BYTES) / (_WIDTH * _WIDTH * BYTES[weights]))
    with torch.inference_mode():
        matrices = _linears(count, _WIDTH, weights)
        row = torch.randn(1, _WIDTH)
        read = _seconds(lambda: [matrix(row) for matrix in matrices], 1)
        many = torch.randn(_MANY_ROWS, _WIDTH)
        compute = _seconds(lambda: [matrix(many) for matrix in matrices[:16]], 1) / min(count, 16)
        calls = _calls(weights)
    reading = max(read - count * calls.linear, read / 4)  # the calls are charged apart
    arithmetic = max(compute - calls.linear, compute / 4)
    bandwidth = count * _WIDTH * _WIDTH * BYTES[weights] / reading
    flops = 2 * _WIDTH * _WIDTH * _MANY_ROWS / arithmetic
    said = (
        f"measured here with {torch.get_num_threads()} threads, {weights}: {bandwidth / GB:.1f} GB/s, "
        f"{flops / TERA:.3f} TFLOP/s; a linear call {calls.linear * 1e6:.1f} µs, another op {calls.op * 1e6:.1f} µs, "
        f"a view {calls.view * 1e6:.1f} µs"
    )
    return Device("cpu", psutil.virtual_memory().total, bandwidth, flops, on_cpu=True, calls=calls, origin=said)


def _calls(weights: str) -> CallCosts:
    (tiny,) = _linears(1, 32, weights)
    row, small = torch.randn(1, 32), torch.randn(2, 64)
    return CallCosts(
        linear=_seconds(lambda: tiny(row), _CALLS),
        op=_seconds(lambda: small * small, _CALLS),
        view=_seconds(lambda: small.view(-1), _CALLS),
    )


def _linears(count: int, width: int, weights: str) -> list[nn.Module]:
    modules = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    pack_linears(modules, cast(WeightKind, weights))
    return list(modules)


def _seconds(work: Callable[[], object], calls: int) -> float:
    """Median seconds of one of `calls` calls in a row."""
    found = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - started) / calls)
    return median(found[1:])
