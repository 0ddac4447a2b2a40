"""The paged forward through transformers' own modules: any decoder that takes a registered attention function.

It is how models that are not Llama-shaped are served, and what the fused decoder is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from shared.models.attention import AttentionPlan

ATTENTION = "redraft_paged"


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer (`AttentionInterface`)."""
    rows = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (key, value)], dim=1)
    out = plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        rows,
        kv_heads=key.shape[1],
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out.view(1, query.shape[2], query.shape[1], -1), None


class TransformersForward:
    """Has the signature of `FusedDecoder.forward`, and the same results."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int]) -> None:
        AttentionInterface.register(ATTENTION, paged_attention)
        model.set_attn_implementation(ATTENTION)
        whole: Any = model
        self._model = whole
        self._captured: dict[int, Tensor] = {}
        layers = whole.get_decoder().layers if feature_layers else ()
        for index in feature_layers:
            layers[index].register_forward_hook(self._capture(index))

    def _capture(self, index: int):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._captured[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    def forward(
        self, token_ids: Tensor, plan: AttentionPlan, select: Tensor | None, feature_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:  # [selected, vocab], [tokens, layers * hidden]
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if select is None else select,
            plan=plan,
        )
        if not feature_layers:
            return output.logits[0], None
        return output.logits[0], torch.cat([self._captured[index][0] for index in feature_layers], dim=-1)
