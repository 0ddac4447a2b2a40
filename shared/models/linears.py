"""Prepacked linear layers for x86 CPUs, and the fp32 weights that each format computes with.

Invariant: a row's result is bitwise the same whatever other rows are in the call, so a token's logits depend
neither on the batch nor on rejected drafts. A packed module drops the weight that it was made from.
It knows nothing of models beyond `nn.Linear`; who may use which format is decided in `target.py`.
"""

from __future__ import annotations

import ctypes
import platform
import warnings
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WeightKind = Literal["fp16", "int8", "bf16", "fp32"]

_WEIGHT_LEVELS = 127  # symmetric: -128 is never used, so |weight| times |input| has one bound
_BF16_ROWS = 32  # of one bf16 call: up to here oneDNN computes a row alike whatever the count
_TINY = torch.finfo(torch.float32).tiny


class PackedLinear(nn.Module):
    """y = x Wᵀ + b for x of shape [..., in_features] fp32; the weight lives in an opaque packed object.

    Packed objects pickle badly: every process packs its own copy. They hold no parameters, so neither
    `state_dict` nor an optimiser sees them.
    """

    kind: WeightKind

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.kind}"


class Fp16Linear(PackedLinear):
    """Weights rounded to fp16 (saturating), inputs, products and sums in fp32."""

    kind: WeightKind = "fp16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:  # [out, in], [out]
        super().__init__(weight.shape[1], weight.shape[0])
        finite = reference_weight(weight, "fp16")  # saturated here, or the operator prints to stderr
        self._packed = torch.ops.quantized.linear_prepack_fp16(finite, None if bias is None else bias.float())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


class Int8Linear(PackedLinear):
    """Weights int8 with one scale for each output, inputs int8 with one scale for each row (W8A8).

    A row is divided by its own absolute maximum first, so that the operator's single input scale is right
    for every row; the maximum is multiplied back after, and the bias is added last for the same reason.
    """

    kind: WeightKind = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None, levels: int | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.levels = levels or input_levels()
        with warnings.catch_warnings():
            # The constructor of quantized tensors is announced for removal; the packed operators are not.
            warnings.filterwarnings("ignore", message=".*quantize.*deprecated", category=UserWarning)
            quantized = torch.quantize_per_channel(
                weight.float(), _scales(weight), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
            )
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias = None if bias is None else bias.detach().float().clone()  # [out]

    def forward(self, x: Tensor) -> Tensor:
        row_max = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)  # [..., 1]
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / row_max, 1.0 / self.levels, self.levels + 1, self._packed
        )
        out = out * row_max
        return out if self._bias is None else out + self._bias


class Bf16Linear(PackedLinear):
    """Weights, inputs and outputs rounded to bf16, products and sums in fp32, on CPUs with AMX.

    oneDNN chooses its kernel by the number of rows, and some kernels sum in another order: calls of at most 32 rows
    are alike for nearly all shapes, and for the others every call is padded to 32.
    """

    kind: WeightKind = "bf16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16().contiguous(), _BF16_ROWS)
        self._bias = None if bias is None else bias.detach().float().clone()  # [out]
        self._pad = not _keeps_bits(self.out_features, self.in_features, torch.get_num_threads())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        if len(rows) <= _BF16_ROWS:
            out = self._call(rows)
        else:
            out = torch.cat([self._call(part) for part in torch.split(rows, _BF16_ROWS)])
        out = out.view(*x.shape[:-1], self.out_features).float()
        return out if self._bias is None else out + self._bias

    def _call(self, rows: Tensor) -> Tensor:  # [at most 32, in] -> [same, out] bf16
        if self._pad:
            return _bf16_product(F.pad(rows, (0, 0, 0, _BF16_ROWS - len(rows))), self._packed)[: len(rows)]
        return _bf16_product(rows, self._packed)


def _bf16_product(rows: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    return out


@cache
def _keeps_bits(out_features: int, in_features: int, threads: int) -> bool:
    """Whether this machine's bf16 product of this shape gives a row the same bits among any number of rows.

    `threads` is part of the key only: the kernels are chosen by it too.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((out_features, in_features), generator=generator, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BF16_ROWS)
    rows = torch.randn((_BF16_ROWS, in_features), generator=generator, dtype=torch.bfloat16)
    full = _bf16_product(rows, packed)
    return all(torch.equal(_bf16_product(rows[:count], packed), full[:count]) for count in (1, 2, 3, 5, 8, 15, 16, 17))


def pack_linears(module: nn.Module, weights: WeightKind) -> None:
    """Replace every `nn.Linear` below `module` in place; fp32 leaves all as it is.

    Subclasses of `nn.Linear` are left alone, because their own forward may read the weight. An embedding
    tied to a packed head keeps its fp32 table. One weight is freed before the next is packed.
    """
    if weights == "fp32":
        return
    packed: dict[nn.Linear, PackedLinear] = {}  # a module may hang under two names
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child not in packed:
                packed[child] = _pack(child, weights)
                child.weight = child.bias = None  # type: ignore[assignment]  # frees it, whoever holds `child`
            setattr(parent, name, packed[child])
    _return_freed_memory()


_PACKED = {"fp16": Fp16Linear, "int8": Int8Linear, "bf16": Bf16Linear}


def _return_freed_memory() -> None:
    """glibc keeps freed weights in its arenas, a fifth of a small replica's memory; other C libraries need no help."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _pack(linear: nn.Linear, weights: WeightKind) -> PackedLinear:
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    packed: PackedLinear = _PACKED[weights](weight, bias)
    packed.train(linear.training)
    return packed


def reference_weight(weight: Tensor, kind: WeightKind) -> Tensor:
    """The fp32 weight [out, in] that a packed linear of this kind computes with."""
    weight = weight.detach().float()
    if kind == "fp16":
        limit = torch.finfo(torch.float16).max
        return weight.clamp(-limit, limit).half().float()
    if kind == "bf16":
        return weight.bfloat16().float()
    if kind == "int8":
        scales = _scales(weight).float().unsqueeze(1)  # [out, 1]
        return (weight / scales).round_().clamp_(-_WEIGHT_LEVELS - 1, _WEIGHT_LEVELS) * scales
    return weight


def reference_input(x: Tensor, kind: WeightKind) -> Tensor:
    """The fp32 input [..., in] that a packed linear of this kind computes with (int8 and bf16 round it)."""
    if kind == "bf16":
        return x.bfloat16().float()
    if kind != "int8":
        return x
    row_max, levels = x.abs().amax(-1, keepdim=True).clamp_min(_TINY), input_levels()
    return (x / row_max * levels).round_() / levels * row_max


def reference_output(product: Tensor, kind: WeightKind) -> Tensor:
    """What a packed linear of this kind makes of the fp32 product [..., out], before the bias (bf16 rounds it)."""
    return product.bfloat16().float() if kind == "bf16" else product


def _scales(weight: Tensor) -> Tensor:
    """[out] float64: the step of each output's int8 weights; a row of zeros gets a harmless one."""
    return (weight.detach().float().abs().amax(1) / _WEIGHT_LEVELS).clamp_min(_TINY).double()


@cache
def input_levels() -> int:
    """Steps on either side of zero for int8 inputs: 127 with AVX-512 VNNI, else 63.

    Without VNNI the kernels add two u8·s8 products in 16 bits, saturating: 2·255·127 would overflow,
    while 2·127·127 = 32,258 does not.
    """
    return 127 if torch.cpu.get_capabilities().get("avx512_vnni", False) else 63


@cache
def packing_supported(kind: WeightKind = "fp16") -> bool:
    """Whether this machine's packed operators of this kind exist and compute what `reference_weight` says.

    bf16 asks for AMX besides: without it, the same products are slower than fp16's.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if kind == "bf16" and not torch.cpu.get_capabilities().get("amx_bf16", False):
        return False
    weight = torch.linspace(-1.0, 1.0, 64 * 16).reshape(16, 64)
    x = torch.stack([torch.ones(64), torch.linspace(-3.0, 2.0, 64)])  # the row of ones would saturate first
    try:
        expected = reference_input(x, kind) @ reference_weight(weight, kind).T
        rounding = 2**-8 if kind == "bf16" else 1e-4  # of the output
        return torch.allclose(_PACKED[kind](weight, None)(x), expected, rtol=rounding, atol=1e-3)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
