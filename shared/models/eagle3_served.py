"""An EAGLE-3 head as it is served: the trained weights, joined and packed, in few operations over the paged cache.

Computes what `Eagle3Head` computes, which stays the reference and the form that is trained and stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.models.attention import AttentionPlan
from shared.models.decoder import DecoderLayer, Linear, RmsNorm
from shared.models.eagle3 import Eagle3Head, angles
from shared.models.fuse import join, qkv_orders
from shared.models.linears import WeightKind, pack_linears
from shared.models.rotary import RotaryTable


class ServedHead:
    """Takes over `head` where it packs: its linears are then empty. With fp32 the two share what is not joined."""

    def __init__(self, head: Eagle3Head, embedding: Tensor, weights: WeightKind = "fp32") -> None:
        config = head.config
        self.config, self.draft_ids = config, head.draft_ids  # [draft_vocab] target id of each draft row, ascending
        self._embedding = embedding  # [vocab, target_hidden] the target's own
        self.dtype = head.norm.weight.dtype  # of hidden states
        orders = qkv_orders(config.heads, config.kv_heads, config.head_dim)
        ups = (torch.arange(config.intermediate),) * 2
        linears = nn.ModuleDict(
            {
                "fc": head.fc,
                "qkv": join((head.q_proj, head.k_proj, head.v_proj), orders),
                "out": head.o_proj,
                "gate_up": join((head.gate_proj, head.up_proj), ups),
                "down": head.down_proj,
                "lm_head": head.lm_head,
            }
        )
        pack_linears(linears, weights)
        self._linears = linears
        self._fc: Linear = linears["fc"].forward
        self._lm_head: Linear = linears["lm_head"].forward
        self._norms = [
            RmsNorm(norm.weight, config.rms_eps)
            for norm in (head.token_norm, head.feature_norm, head.mlp_norm, head.norm)
        ]
        self._token_norm, self._feature_norm, mlp_norm, self._norm = self._norms
        self._layer = DecoderLayer(
            index=0,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=0,
            qkv=linears["qkv"].forward,
            out=linears["out"].forward,
            gate_up=linears["gate_up"].forward,
            down=linears["down"].forward,
            mlp_norm=mlp_norm,
        )
        self._rotary = RotaryTable(lambda positions: angles(config, positions), config.max_positions)

    @torch.no_grad()
    def copy_(self, other: ServedHead) -> None:
        """Takes over another version's weights, in the tensors that are there: recorded steps read these addresses."""
        assert self.config == other.config, "versions of one base"
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours.copy_(theirs)

    def _tensors(self) -> list[Tensor]:
        parameters = list(self._linears.parameters())
        assert parameters, "packed weights cannot be written"
        return [*parameters, *(part for norm in self._norms for part in norm.tensors()), self.draft_ids]

    def fuse(self, features: Tensor) -> Tensor:  # [tokens, layers * target_hidden] -> [tokens, hidden]
        return self._fc(features.to(self.dtype))

    def forward(
        self,
        token_ids: Tensor,  # [tokens] the token after each row's position
        hidden: Tensor,  # [tokens, hidden] fused features, or the output of the draft step before
        plan: AttentionPlan,
    ) -> Tensor:  # [tokens, hidden]
        """One pass of the layer, keys written. The result predicts through `logits` and feeds the next step."""
        tokens = F.embedding(token_ids, self._embedding).to(self.dtype)
        x = torch.cat([self._token_norm(tokens), self._feature_norm(hidden)], dim=-1)
        hidden = hidden + self._layer.attention(x, self._rotary.at(plan.positions, plan.longest), plan)
        hidden += self._layer.mlp(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, draft_vocab]
        return self._lm_head(self._norm(hidden))
