"""Collects one request's trace while it runs: kinds, probabilities, rounds, raw top-k, and the target's features.

It copies what the verification computed anyway and computes nothing of its own. Features are kept for exactly the
positions that the target read, in order, rejected drafts left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.engine.request import GenerationRequest
from shared.trace import Kind, Round, TraceRecord


@dataclass(frozen=True)
class TopK:
    """The target's raw distribution at those rows of a step that commit a token."""

    ids: Tensor  # [kept, k]
    logprobs: Tensor  # [kept, k]
    lse: Tensor  # [kept]
    place: dict[int, int]  # row of the step -> row here

    @classmethod
    def of(cls, logits: Tensor, k: int, rows: Sequence[int]) -> TopK:  # [step's rows, vocab]
        if len(rows) < len(logits):
            logits = logits[list(rows)]
        lse = logits.logsumexp(-1)
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return cls(ids.cpu(), (values - lse[:, None]).cpu(), lse.cpu(), {row: i for i, row in enumerate(rows)})


@dataclass
class Recorder:
    """One request's trace in the making."""

    request: GenerationRequest
    target: str
    replica: str
    with_features: bool
    position_share: float
    kinds: list[Kind] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    topk: list[tuple[int, TopK, int]] = field(default_factory=list)  # position, step's top-k, row in it
    rejected: list[tuple[int, int]] = field(default_factory=list)
    rejected_probs: list[float] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    def commit(self, position: int, kind: Kind, prob: float, topk: TopK, row: int) -> None:
        """A committed token. Its top-k is kept at a share of positions, spread evenly, and wherever a draft fell."""
        self.kinds.append(kind)
        self.probs.append(prob)
        before, after = int(position * self.position_share), int((position + 1) * self.position_share)
        if kind is Kind.RECOVERED or after > before:
            self.topk.append((position, topk, topk.place[row]))

    def reject(self, position: int, draft_id: int, prob: float) -> None:
        self.rejected.append((position, draft_id))
        self.rejected_probs.append(prob)

    def read(self, features: Tensor) -> None:  # [rows, layers * hidden]
        """Features of rows that are committed for good."""
        if self.with_features:
            self.features.append(features.half())

    def restart(self) -> None:
        """Preemption: the target reads everything again from the start."""
        self.features.clear()

    def finish(self, tokens: list[int]) -> tuple[TraceRecord, Tensor | None]:
        """The record, and [prompt + committed - 1, layers * hidden] float16 features if they were asked for."""
        prompt = len(self.request.prompt_ids)
        committed = len(tokens) - prompt
        features = None
        if self.with_features and self.features and committed:
            features = torch.cat(self.features)[: len(tokens) - 1].cpu()
            if len(features) < len(tokens) - 1:
                features = None
        topk = [item for item in self.topk if item[0] < committed]
        width = topk[0][1].ids.shape[1] if topk else 0
        params = self.request.params
        record = TraceRecord(
            id=self.request.id,
            tenant=self.request.tenant,
            domain=self.request.domain,
            target=self.target,
            replica=self.replica,
            finished_at=time.time(),
            sampling=replace(params.sampling, constrained=params.grammar is not None or params.min_tokens > 0),
            prompt_ids=np.asarray(tokens[:prompt], dtype=np.int32),
            output_ids=np.asarray(tokens[prompt:], dtype=np.int32),
            kinds=np.asarray(self.kinds[:committed], dtype=np.uint8),
            probs=np.asarray(self.probs[:committed], dtype=np.float32),
            rounds=tuple(self.rounds),
            topk_positions=np.asarray([position for position, _, _ in topk], dtype=np.int32),
            topk_ids=_stack([step.ids[row].numpy() for _, step, row in topk], width, np.int32),
            topk_logprobs=_stack([step.logprobs[row].numpy() for _, step, row in topk], width, np.float16),
            topk_lse=np.asarray([float(step.lse[row]) for _, step, row in topk], dtype=np.float32),
            rejected=np.asarray(self.rejected, dtype=np.int32).reshape(-1, 2),
            rejected_probs=np.asarray(self.rejected_probs, dtype=np.float32),
            has_features=features is not None,
        )
        return record, features


def _stack(rows: list[NDArray[Any]], width: int, dtype: type) -> NDArray[Any]:
    return np.stack(rows).astype(dtype) if rows else np.zeros((0, width), dtype=dtype)
