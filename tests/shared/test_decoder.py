"""The fused forward: who gets it, and that it computes what transformers' own code does, in every weight format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shared.models.linears import WeightKind, packing_supported
from shared.models.paged import PagedKV, PagedModel, Segment
from shared.models.rotary import pair_order, rotate_
from shared.models.target import load_model
from shared.models.twin import fuse, is_fused
from tests.shared.test_target import reference_logits
from tests.tiny import FAMILIES, build_tiny_model

FUSED = ("llama", "mistral", "qwen2", "qwen3")
KINDS: tuple[WeightKind, ...] = ("fp32", *(kind for kind in ("fp16", "bf16", "int8") if packing_supported(kind)))
TABLE = [5, 2, 3, 4]  # 16 positions a block; the first block lies apart
IDS = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1))


def paged_logits(paged: PagedModel, ids: Tensor = IDS) -> Tensor:  # [tokens, vocab]
    """Read as a prompt's chunk, then a few rows, then one at a time."""
    parts, first = [], 0
    for count in (30, 7, 1, 1, 1):
        segment = Segment(TABLE, first, count)
        parts.append(paged.forward(ids[first : first + count].tolist(), [segment], range(count)).logits)
        first += count
    return torch.cat(parts)


def load(folder: Path, kind: str, layers: tuple[int, ...] = ()) -> PagedModel:
    loaded = load_model(str(folder), home=folder.parent, device="cpu", weights=kind)
    return PagedModel(loaded, PagedKV(6, 16), layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_logits_are_those_of_transformers_in_the_same_weight_format(
    tmp_path: Path, family: str, kind: WeightKind
) -> None:
    folder = build_tiny_model(tmp_path / "m", family=family)
    paged = load(folder, kind)
    assert paged.fused == (family in FUSED)
    off = (paged_logits(paged) - reference_logits(folder, kind, IDS[None])[0]).abs()
    if kind in ("fp32", "fp16"):
        assert off.max() < 1e-3
    else:  # a value at the edge between two steps of an input's rounding may fall either way, rarely
        rounding = (reference_logits(folder, kind, IDS[None]) - reference_logits(folder, "fp32", IDS[None])).abs()
        assert off.mean() < rounding.mean() / 3


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_scalings_are_the_models_own(rope: dict[str, Any]) -> None:
    model = tiny("llama", rope_parameters=rope | {"rope_theta": 10000.0})
    with torch.inference_mode():
        expected = model(IDS[None]).logits[0]
        assert fuse(model)
        torch.testing.assert_close(model(IDS[None]).logits[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(paged_logits(PagedModel(Bare(model), PagedKV(6, 16))), expected, atol=1e-3, rtol=0)  # type: ignore[arg-type]


class Bare:
    """What a `PagedModel` asks of a loaded model."""

    device, token_count = torch.device("cpu"), 320

    def __init__(self, model: Any) -> None:
        self.model = model


def tiny(family: str, **settings: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **shape | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),  # one layer does not rotate
        ("granite", {"embedding_multiplier": 2.0}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"logits_scaling": 4.0}),
        ("helium", {}),  # rotates neighbours
        ("glm", {}),  # rotates a part
        ("olmo2", {}),  # norms after
        ("starcoder2", {}),  # no gate
        ("mixtral", {"num_local_experts": 2}),
    ],
)
def test_a_family_that_differs_anywhere_goes_through_transformers(family: str, settings: dict[str, Any]) -> None:
    model = tiny(family, **settings)
    assert not fuse(model)
    assert not is_fused(model)


def test_names_do_not_decide() -> None:
    """A family that nobody listed is fused when it computes the same."""
    assert fuse(tiny("granite", embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0))


@pytest.mark.parametrize("layer", [0, 3])
def test_one_layer_of_another_kind_is_enough(layer: int) -> None:
    model = tiny("llama")
    model.model.layers[layer].self_attn.extra = torch.nn.Linear(8, 8)
    assert not fuse(model)


def test_every_weight_is_held_once_and_the_reference_goes_on() -> None:
    model = tiny("qwen3", attention_bias=True)
    before = sum(parameter.numel() for parameter in model.parameters())
    with torch.inference_mode():
        expected = model(IDS[None]).logits
        assert fuse(model)
        torch.testing.assert_close(model(IDS[None]).logits, expected, atol=1e-4, rtol=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == before
    assert fuse(model), "asked again, it is fused already"


def test_features_are_the_outputs_of_the_layers(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", layers=4)
    paged = load(folder, "fp32", (0, 2, 3))
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = model.model(IDS[None], output_hidden_states=True).hidden_states
        found: dict[int, Tensor] = {}
        model.model.layers[3].register_forward_hook(lambda _m, _a, out: found.update(last=out))
        model(IDS[None])
    expected = torch.cat([hidden[1], hidden[3], found["last"]], dim=-1)[0]
    features = paged.forward(IDS.tolist(), [Segment(TABLE, 0, 40)], [39]).features
    assert features is not None
    torch.testing.assert_close(features, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fp32"])
def test_a_decoded_row_keeps_its_bits_in_a_batch(tmp_path: Path, kind: str) -> None:
    """fp32 is left out: its products choose another order of sums by the number of rows."""
    paged = load(build_tiny_model(tmp_path / "m"), kind)
    prompts = [torch.arange(3 + i, 12 + 2 * i).tolist() for i in range(6)]
    for i, prompt in enumerate(prompts):
        paged.forward(prompt[:-1], [Segment([i], 0, len(prompt) - 1)], [])
    segments = [Segment([i], len(prompt) - 1, 1) for i, prompt in enumerate(prompts)]
    together = paged.forward([prompt[-1] for prompt in prompts], segments, range(6)).logits
    for i, prompt in enumerate(prompts):
        assert torch.equal(paged.forward(prompt[-1:], [segments[i]], [0]).logits[0], together[i])


def test_a_rotation_in_pairs_is_the_rotation_of_halves() -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 1, 4)
    left, right = x.chunk(2, dim=-1)
    halves = torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)
    for dtype, atol in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7 * 4)):  # bf16: half a step of values up to 4
        paired = x[..., pair_order(8)].to(dtype)
        rotate_(paired, torch.polar(torch.ones_like(angles), angles))
        torch.testing.assert_close(paired.float(), halves[..., pair_order(8)], atol=atol, rtol=0)
