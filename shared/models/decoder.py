"""The forward of a Llama-shaped decoder in few operations, over the paged cache.

Llama-shaped: token embedding; in every layer RMSNorm, rotary attention (grouped heads, optional biases, an optional
RMSNorm of each query and key head, an optional sliding window), a residual sum, RMSNorm, a gated MLP, a residual sum;
then RMSNorm and an output layer, with no factor anywhere in between. Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are;
`twin.py` decides. Projections of the same input are one linear (`fuse.py`). It knows nothing of batches or requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.models.attention import AttentionPlan
from shared.models.rotary import RotaryTable, rotate_

Linear = Callable[[Tensor], Tensor]  # [tokens, in] -> [tokens, out], a fresh tensor


class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    On CPU, F.rms_norm takes eight operations. This takes four: sqrt(mean(x²) + eps) is hypot(‖x‖, √(n eps)) / √n.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:  # [..., n]
        self._n, self._eps, self._weight = weight.shape[-1], eps, weight
        self._floor = torch.tensor(math.sqrt(self._n * eps), device=weight.device)
        self._scaled = weight * math.sqrt(self._n)

    def tensors(self) -> tuple[Tensor, ...]:
        """All that depends on the weight."""
        return self._weight, self._scaled

    def __call__(self, x: Tensor) -> Tensor:  # [..., n]
        if x.is_cuda:
            if self._weight.ndim == 1:
                return F.rms_norm(x, (self._n,), self._weight, self._eps)
            return F.rms_norm(x, (self._n,), eps=self._eps) * self._weight
        return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)).mul_(self._scaled)


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights, and what attention needs to know."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int  # positions a query sees, itself included; 0: all
    qkv: Linear  # queries of all heads, keys, values; query and key heads in pairs (`rotary.pair_order`)
    out: Linear
    gate_up: Linear  # the gate, then what it gates
    down: Linear
    mlp_norm: RmsNorm
    head_norm: RmsNorm | None = None  # weight [heads + kv_heads, head_dim]
    activation: Linear = F.silu

    def attention(self, x: Tensor, factors: Tensor, plan: AttentionPlan) -> Tensor:  # [tokens, in] -> [tokens, hidden]
        """Of normed inputs; writes their keys and values."""
        queries, dim = self.heads * self.head_dim, self.head_dim
        turning = self.heads + self.kv_heads
        qkv = self.qkv(x)  # [tokens, (heads + 2 kv_heads) * dim]
        turned = qkv[:, : turning * dim].view(len(x), turning, dim)
        if self.head_norm is not None:
            turned.copy_(self.head_norm(turned))
        rotate_(turned, factors)
        attended = plan.attend(
            self.index,
            turned[:, : self.heads],
            qkv[:, queries:],
            kv_heads=self.kv_heads,
            scale=self.scale,
            window=self.window,
        )
        return self.out(attended)

    def mlp(self, hidden: Tensor) -> Tensor:  # [tokens, hidden]
        """Of the residual stream."""
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


class FusedDecoder:
    """The whole forward. The weights are those of a fused transformers model, shared."""

    def __init__(
        self,
        embedding: Tensor,  # [vocab, hidden]
        layers: Sequence[tuple[RmsNorm, DecoderLayer]],  # each with the norm of what it reads
        norm: RmsNorm,
        lm_head: Linear,
        rotary: RotaryTable,
    ) -> None:
        self._embedding, self._layers, self._norm = embedding, tuple(layers), norm
        self._lm_head, self._rotary = lm_head, rotary

    def forward(
        self,
        token_ids: Tensor,  # [tokens]
        plan: AttentionPlan,
        select: Tensor | None,  # [selected] rows whose logits are wanted; None: all
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # [selected, vocab], [tokens, layers * hidden]
        hidden = F.embedding(token_ids, self._embedding)
        factors = self._rotary.at(plan.positions, plan.longest)
        features: dict[int, Tensor] = {}
        for norm, layer in self._layers:
            hidden += layer.attention(norm(hidden), factors, plan)
            hidden += layer.mlp(hidden)
            if layer.index in feature_layers:
                features[layer.index] = hidden.clone()  # the next layer adds in place
        wanted = hidden if select is None else hidden.index_select(0, select)
        logits = self._lm_head(self._norm(wanted))
        if not feature_layers:
            return logits, None
        return logits, torch.cat([features[index] for index in feature_layers], dim=-1)
