"""Packed linears: exact to their reference weights, and blind to the other rows of a call."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from shared.models import linears
from shared.models.linears import (
    Bf16Linear,
    Fp16Linear,
    Int8Linear,
    PackedLinear,
    WeightKind,
    pack_linears,
    packing_supported,
    reference_input,
    reference_weight,
)

pytestmark = pytest.mark.skipif(
    not packing_supported(), reason="needs an x86_64 CPU with torch's packed linear operators"
)

KINDS: tuple[WeightKind, ...] = tuple(kind for kind in ("fp16", "int8", "bf16") if packing_supported(kind))
CLASSES: dict[WeightKind, type[PackedLinear]] = {"fp16": Fp16Linear, "int8": Int8Linear, "bf16": Bf16Linear}
# out, in: the default target's shapes, and odd ones that no vector width divides
SHAPES = ((192, 576), (576, 1536), (1536, 576), (37, 50), (7, 3))
# Sums of 1,536 products in fp32, in another order than the float64 oracle's: about sqrt(1536) * 2^-24 of the
# largest partial sum, which stays below 64 here.
ACCUMULATION = 1e-4


def made(kind: WeightKind, out_features: int, in_features: int, bias: bool = True) -> tuple[nn.Linear, PackedLinear]:
    """A random linear and its packed twin."""
    plain = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(plain.weight, std=0.1)
    return plain, CLASSES[kind](plain.weight.detach(), None if plain.bias is None else plain.bias.detach())


def oracle(plain: nn.Linear, x: Tensor, kind: WeightKind) -> Tensor:
    out = reference_input(x, kind).double() @ reference_weight(plain.weight, kind).double().T
    return out if plain.bias is None else out + plain.bias.detach().double()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_computes_with_its_reference_weight(kind: WeightKind, shape: tuple[int, int], bias: bool) -> None:
    plain, packed = made(kind, *shape, bias=bias)
    x = torch.randn(2, 5, shape[1]) * torch.tensor([0.01, 1.0, 30.0, 1.0, 1.0]).unsqueeze(-1)
    expected = oracle(plain, x, kind)
    if kind == "int8":  # an input on the edge between two steps may round either way: one step of one input
        slack = x.abs().amax() / 127 * plain.weight.abs().amax()
        exact = ((packed(x) - expected).abs() <= ACCUMULATION).float().mean()
        assert exact > 0.95
        assert (packed(x) - expected).abs().max() <= 2 * slack + ACCUMULATION
    else:
        product = expected if plain.bias is None else expected - plain.bias.detach()
        rounding = 2**-8 if kind == "bf16" else 1e-5  # of the product, before the bias: half of the eighth bit
        assert ((packed(x) - expected).abs() <= ACCUMULATION + rounding * product.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_see_its_neighbours(kind: WeightKind, shape: tuple[int, int]) -> None:
    _, packed = made(kind, *shape)
    x = torch.randn(70, shape[1])
    x[1] *= 1000  # a neighbour that would set the scale of a call-wide quantisation
    together = packed(x)
    for rows in (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 64):
        for start in (0, 1, 70 - rows):
            assert torch.equal(packed(x[start : start + rows]), together[start : start + rows]), (rows, start)
    assert torch.equal(packed(x.view(7, 10, -1)).view(70, -1), together)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_keeps_its_bits_among_other_rows(kind: WeightKind) -> None:
    _, packed = made(kind, 192, 576)
    row, crowd = torch.randn(1, 576), torch.randn(12, 576) * 50
    alone = packed(row)
    for place in range(12):
        batch = crowd.clone()
        batch[place] = row
        assert torch.equal(packed(batch)[place : place + 1], alone)


@pytest.mark.skipif("bf16" not in KINDS, reason="needs a CPU with AMX")
def test_a_shape_whose_kernels_disagree_is_padded_to_one_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_keeps_bits", lambda *_: False)
    counts: list[int] = []
    product = linears._bf16_product
    monkeypatch.setattr(
        linears, "_bf16_product", lambda rows, packed: counts.append(len(rows)) or product(rows, packed)
    )
    packed = Bf16Linear(torch.randn(24, 40), None)
    x = torch.randn(37, 40)
    assert packed(x).shape == (37, 24)
    assert counts == [32, 32]
    assert torch.equal(packed(x[36:]), packed(x)[36:])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_rows_of_zeros(kind: WeightKind) -> None:
    plain, packed = made(kind, 16, 24)
    assert packed(torch.zeros(0, 24)).shape == (0, 16)
    torch.testing.assert_close(packed(torch.zeros(3, 24)), plain.bias.detach().expand(3, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_whose_weights_are_zero_is_its_bias(kind: WeightKind) -> None:
    weight = torch.randn(8, 24)
    weight[3] = 0
    packed = CLASSES[kind](weight, None)
    assert torch.equal(packed(torch.randn(5, 24))[:, 3], torch.zeros(5))


def test_int8_sums_do_not_saturate() -> None:
    ones = Int8Linear(torch.ones(8, 576), None)
    assert torch.equal(ones(torch.ones(1, 576)), torch.full((1, 8), 576.0))


def test_reduced_input_range_fits_sixteen_bits() -> None:
    levels = 63
    highest_input, highest_weight = 2 * levels + 1, 127  # inputs are unsigned around levels + 1
    assert 2 * highest_input * highest_weight <= 2**15 - 1
    assert 2 * (2 * 127 + 1) * highest_weight > 2**15 - 1  # and the full range would not


def test_a_cpu_without_vnni_gets_the_reduced_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    linears.input_levels.cache_clear()
    try:
        plain = nn.Linear(64, 32)
        packed = Int8Linear(plain.weight.detach(), plain.bias.detach())
        assert packed.levels == 63
        x = torch.randn(9, 64)
        # one step of one input is x.max / 63 times a weight below 1/8; the sum of 64 such errors, as noise
        torch.testing.assert_close(packed(x), oracle(plain, x, "int8").float(), atol=0.02, rtol=0)
    finally:
        linears.input_levels.cache_clear()


def test_int8_reference_is_the_dequantised_weight() -> None:
    weight = torch.randn(32, 48)
    reference = reference_weight(weight, "int8")
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((reference - weight).abs() <= step / 2 * 1.001).all()
    steps = reference / step
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)


def test_fp16_overflow_saturates_silently(capfd: pytest.CaptureFixture[str]) -> None:
    packed = Fp16Linear(torch.full((4, 4), 1e6), None)
    assert torch.equal(packed(torch.ones(1, 4)), torch.full((1, 4), 4 * 65504.0))
    assert capfd.readouterr().err == ""


class Router(nn.Linear):
    """A linear whose owner reads the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 2, self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.again = self.layers[0]
        self.router = Router(8, 2)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight  # tied


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_is_replaced_in_place(kind: WeightKind) -> None:
    net = Net().eval()
    table = net.embed.weight.detach().clone()
    x = torch.randn(3, 8)
    expected = x @ reference_weight(table, "fp16").T
    pack_linears(net, kind)
    kinds = [module.kind for module in net.modules() if isinstance(module, PackedLinear)]
    assert kinds == [kind] * 3
    assert not [module for module in net.modules() if type(module) is nn.Linear]
    assert net.again is net.layers[0]
    assert isinstance(net.router, Router)
    assert torch.equal(net.embed.weight, table)
    assert (net.head.in_features, net.head.out_features) == (8, 20)
    # int8 on 8 inputs: at most half a step (1/254) of the largest input and weight, on both sides, eight times
    # bf16 rounds inputs, weights and the output to 8 bits: three times 2^-9 of sums below 4
    atol = {"int8": 0.2, "bf16": 3 * 2**-9 * 4 * 3, "fp16": 1e-5}[kind]
    torch.testing.assert_close(net.head(x), expected, atol=atol, rtol=0)
    assert sorted(net.state_dict()) == ["embed.weight", "router.bias", "router.weight"]
    assert not any(module.training for module in net.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_packing_frees_the_weight(kind: WeightKind) -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    linear = net[0]
    weight = weakref.ref(linear.weight)
    pack_linears(net, kind)
    assert linear.weight is None  # even for whoever still holds the old module
    assert weight() is None


def test_fp32_changes_nothing() -> None:
    net = Net()
    before = dict(net.named_modules())
    pack_linears(net, "fp32")
    assert dict(net.named_modules()) == before
    weight = torch.randn(3, 3)
    assert torch.equal(reference_weight(weight, "fp32"), weight)


def test_other_architectures_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    packing_supported.cache_clear()
    try:
        assert not packing_supported()
    finally:
        packing_supported.cache_clear()
