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
from shared.models.graphs import CudaRecorder, Recorder, StepGraphs
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

    def __init__(
        self,
        loaded: LoadedModel,
        kv: PagedKV,
        feature_layers: Sequence[int] = (),
        recorder: Recorder | None = None,  # of decode steps; a fused model on CUDA has one anyway
    ) -> None:
        self.loaded, self.kv = loaded, kv
        self._recorder = CudaRecorder() if recorder is None and loaded.device.type == "cuda" else recorder
        self._graphs: StepGraphs | None = None
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
        ids = torch.tensor(token_ids, device=device)
        rows = None if len(select) == len(token_ids) else torch.tensor(select, device=device, dtype=torch.long)
        graphs = self._step_graphs()
        if graphs is not None and graphs.fits(segments):
            logits, *rest = graphs.run(segments, (ids,))
            logits = logits if rows is None else logits.index_select(0, rows)
            features = rest[0] if rest else None
        else:
            plan = AttentionPlan(self.kv, segments, device)
            logits, features = self._forward.forward(ids, plan, rows, self.feature_layers)
        logits = logits.float()
        if self.loaded.token_count < logits.shape[-1]:
            logits[:, self.loaded.token_count :] = float("-inf")
        return Forward(logits, features)

    def _step_graphs(self) -> StepGraphs | None:
        if self._recorder is None or not self.fused:
            return None
        if self._graphs is None or self._graphs.kv is not self.kv:
            limit, device = self.loaded.max_positions, self.loaded.device
            self._graphs = StepGraphs(self._step, self.kv, limit, device, self._recorder)
        return self._graphs

    def _step(self, plan: AttentionPlan, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, features = self._forward.forward(inputs[0], plan, None, self.feature_layers)
        return (logits,) if features is None else (logits, features)
