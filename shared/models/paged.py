"""A loaded model over a paged cache: token ids and block tables in, logits and features out.

It chooses the forward once: the fused decoder for Llama-shaped models, transformers' own modules for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.models.attention import AttentionPlan, PagedKV, Segment
from shared.models.decoder import FusedDecoder
from shared.models.target import LoadedModel
from shared.models.transformers_forward import TransformersForward
from shared.models.twin import fuse, fused_decoder

__all__ = ["AttentionPlan", "Forward", "PagedKV", "PagedModel", "Segment"]


@dataclass(frozen=True)
class Forward:
    """What a forward returns."""

    logits: Tensor  # [selected, vocab] float32; ids that are padding are -inf
    features: Tensor | None  # [tokens, layers * hidden] outputs of the asked layers, side by side


class PagedModel:
    """A causal LM whose attention reads and writes a PagedKV."""

    def __init__(self, loaded: LoadedModel, kv: PagedKV, feature_layers: Sequence[int] = ()) -> None:
        self.loaded, self.kv = loaded, kv
        self.feature_layers = tuple(feature_layers)
        self.fused = fuse(loaded.model)
        self._forward: FusedDecoder | TransformersForward = (
            fused_decoder(loaded.model) if self.fused else TransformersForward(loaded.model, self.feature_layers)
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        select: Sequence[int],  # rows whose logits are wanted, each once, ascending
    ) -> Forward:
        """One packed forward; writes the rows' KV. `token_ids` holds the segments' rows one after the other."""
        device = self.loaded.device
        plan = AttentionPlan(self.kv, segments, device)
        ids = torch.tensor(token_ids, device=device)
        rows = None if len(select) == len(token_ids) else torch.tensor(select, device=device, dtype=torch.long)
        logits, features = self._forward.forward(ids, plan, rows, self.feature_layers)
        logits = logits.float()
        if self.loaded.token_count < logits.shape[-1]:
            logits[:, self.loaded.token_count :] = float("-inf")
        return Forward(logits, features)
