"""Seconds of a step from bytes and multiply-adds: the roofline (Williams et al. 2009), part by part.

A step runs its parts one after the other, so each part takes the longer of its reading and its arithmetic, and the
parts add up. `Model` is a shape in a weight format on a device; it is the only thing here that knows a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.plan_calls import NO_CALLS, Calls
from ops.plan_device import Device
from ops.plan_shape import BYTES, ModelShape

# Passes over a step's fp32 logits: the copy to float, filters with softmax (two), top-k with log-sum-exp (two).
_LOGIT_PASSES = 5
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Step:
    """Seconds by part."""

    body: float
    attention: float
    head: float
    calls: float

    @property
    def seconds(self) -> float:
        return self.body + self.attention + self.head + self.calls


@dataclass(frozen=True)
class Model:
    """`calls` are those of a forward; `fused` are weights read once a round beside the body (a head's features)."""

    shape: ModelShape
    weights: str
    device: Device
    calls: Calls = NO_CALLS
    fused: int = 0

    @property
    def kv_width(self) -> int:
        """Bytes of a number in the KV cache: the CPU engine computes in fp32 whatever the weights are."""
        return 4 if self.device.on_cpu else BYTES[self.weights]

    @property
    def kv_token(self) -> int:
        return self.shape.kv_bytes(self.kv_width)

    @property
    def bytes(self) -> int:
        fused = self.fused * BYTES[self.weights]
        return self.shape.weight_bytes(self.weights, on_cpu=self.device.on_cpu) + fused

    def step(
        self,
        rows: float,  # tokens read in this step
        context: float,  # mean positions that a row attends to
        sequences: float,  # whose KV is read
        *,
        decided: float | None = None,  # rows with logits; all by default
        fused: bool = False,  # the first draft of a round reads the fusion weights as well
    ) -> Step:
        shape, device, width = self.shape, self.device, BYTES[self.weights]
        extra = self.fused if fused else 0
        body = max(
            (shape.read(rows) + extra) * width / device.bandwidth, 2 * (shape.active + extra) * rows / device.flops
        )
        attention = max(
            self.kv_token * sequences * context / device.bandwidth,
            4 * shape.layers * shape.heads * shape.head_dim * rows * context / device.flops,
        )
        decided = rows if decided is None else decided
        head = max(shape.head * width / device.bandwidth, 2 * shape.head * decided / device.flops) if decided else 0.0
        head += decided * shape.vocab * _LOGIT_BYTES * _LOGIT_PASSES / device.bandwidth
        return Step(body, attention, head, self.calls.seconds(device.calls))
