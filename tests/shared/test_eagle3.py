"""The head's choice of target layers, and its served form against the trained one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shared.models.attention import AttentionPlan, PagedKV, Segment
from shared.models.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers
from shared.models.eagle3_served import ServedHead
from shared.models.linears import WeightKind, packing_supported, reference_weight
from tests.shared.test_target import rounded_linear
from tests.tiny_engine import attend_causally


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 12, 30, 80])
def test_three_layers_that_exist_in_ascending_order(layers: int) -> None:
    low, middle, high = default_feature_layers(layers)
    assert 0 <= low <= middle <= high < layers


def test_the_shipped_heads_layers() -> None:
    assert default_feature_layers(30) == (3, 15, 28)


CONFIG = Eagle3Config(
    target_hidden=32, feature_layers=(0, 1), hidden=48, intermediate=64, heads=4, kv_heads=2, head_dim=8, draft_vocab=20
)


@pytest.mark.parametrize("kind", ["fp32", *(kind for kind in ("fp16", "bf16", "int8") if packing_supported(kind))])
@torch.inference_mode()
def test_a_served_head_computes_what_the_trained_one_does(kind: WeightKind) -> None:
    """Chunk by chunk over scattered blocks, against one causal pass with each format's own weights and inputs."""
    torch.manual_seed(0)
    embedding, ids, features = torch.randn(50, 32), torch.randint(0, 50, (9,)), torch.randn(9, 64)
    head, plain = Eagle3Head(CONFIG, embedding).eval(), Eagle3Head(CONFIG, embedding).eval()
    plain.load_state_dict(head.state_dict())
    exact = expected_logits(plain, ids, features)
    for linear in [module for module in plain.modules() if isinstance(module, nn.Linear)]:
        linear.weight = nn.Parameter(reference_weight(linear.weight, kind))
        linear.forward = partial(rounded_linear, linear, kind)
    expected = expected_logits(plain, ids, features)
    served, kv = ServedHead(head, embedding, kind), PagedKV(4, 4)
    parts = []
    for first, count in ((0, 6), (6, 2), (8, 1)):
        rows = slice(first, first + count)
        plan = AttentionPlan(kv, [Segment([2, 0, 3], first, count)], torch.device("cpu"))
        parts.append(served.logits(served.forward(ids[rows], served.fuse(features[rows]), plan)))
    off = (torch.cat(parts) - expected).abs()
    if kind in ("fp32", "fp16"):
        assert off.max() < 1e-4  # sums in another order
    else:  # a value at the edge between two steps of an input's rounding may fall either way, rarely
        assert off.mean() < (expected - exact).abs().mean() / 3


def expected_logits(head: Eagle3Head, ids: Tensor, features: Tensor) -> Tensor:  # [tokens, draft_vocab]
    positions = torch.arange(len(ids))[None]
    return head.logits(head(ids[None], head.fuse(features)[None], positions, attend_causally))[0]
