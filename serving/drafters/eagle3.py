"""The EAGLE-3 head as a drafter: catches up with true features, then feeds itself.

Its KV row i holds position i computed from the target's own features; rows that it fed to itself lie beyond
`DraftState.kv_len` and are written anew in the next round. Draft token probabilities live in the draft vocabulary and
are spread over the target's only where a sampled request needs them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.drafters.base import DraftJob, concat, pick
from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from serving.spec.noise import gumbel
from shared.models.eagle3 import Eagle3Head
from shared.models.paged import AttentionPlan, PagedKV, Segment


class Eagle3Drafter:
    """Drafts chains with an `Eagle3Head` whose linears are packed."""

    kind = "eagle3"

    def __init__(self, head: Eagle3Head, version: str, kv: PagedKV, *, vocab_size: int, device: torch.device) -> None:
        self.head, self.version, self._kv = head, version, kv
        self.feature_layers = head.config.feature_layers
        self.max_positions = head.config.max_positions
        self._vocab_size, self._device = vocab_size, device
        self._target_ids: list[int] = head.draft_ids.tolist()  # draft row -> target id

    def swap(self, head: Eagle3Head, version: str) -> None:
        """Serve another version of the same shape. Sequences in flight keep the KV that the old one wrote."""
        self.head, self.version = head, version
        self._target_ids = head.draft_ids.tolist()

    def commit(self, sequence: Sequence, kept: int, features: Tensor | None) -> None:
        assert features is not None, "the engine hands over the layers that the head asks for"
        if sequence.request.params.speculative:
            # A copy: the rows are a view that would keep those of the whole step alive until the next draft.
            sequence.draft.features.append(features.clone())

    @torch.inference_mode()
    def propose(self, jobs: Seq[DraftJob]) -> list[Draft]:
        hidden = self._catch_up(jobs)
        tokens: list[list[int]] = [[] for _ in jobs]
        probs: list[list[Tensor]] = [[] for _ in jobs]
        active = list(range(len(jobs)))
        depth = 0
        while active:
            logits = self.head.logits(hidden).float()  # [active, draft_vocab]
            for row, index in enumerate(active):
                self._pick(jobs[index].sequence, logits[row], depth, tokens[index], probs[index])
            depth += 1
            going = [row for row, index in enumerate(active) if jobs[index].gamma > depth]
            active = [active[row] for row in going]
            if active:
                hidden = self._step([jobs[i] for i in active], [tokens[i][-1] for i in active], hidden[going], depth)
        return [
            Draft.chain(ids, torch.stack(rows) if rows else None, self.version)
            for ids, rows in zip(tokens, probs, strict=True)
        ]

    def _catch_up(self, jobs: Seq[DraftJob]) -> Tensor:  # [jobs, hidden]
        """Read every position that the target has read since; the last row of each predicts its first draft."""
        ids: list[int] = []
        segments: list[Segment] = []
        features: list[Tensor] = []
        last: list[int] = []
        for job in jobs:
            sequence, state = job.sequence, job.sequence.draft
            first, end = state.kv_len, sequence.kv_len
            ids.extend(sequence.tokens[first + 1 : end + 1])
            segments.append(Segment(sequence.table, first, end - first))
            features.extend(state.features)
            last.append(len(ids) - 1)
            state.kv_len = end
            state.features = []
        # On CUDA the target computes in bfloat16 and the head in float32.
        fused = self.head.fuse(concat(features).to(self.head.norm.weight.dtype))
        return self._run(ids, fused, segments)[last]

    def _step(self, jobs: Seq[DraftJob], token_ids: Seq[int], hidden: Tensor, depth: int) -> Tensor:
        segments = [Segment(job.sequence.table, job.sequence.kv_len + depth - 1, 1) for job in jobs]
        return self._run(token_ids, hidden, segments)

    def _run(self, token_ids: Seq[int], hidden: Tensor, segments: Seq[Segment]) -> Tensor:  # [tokens, hidden]
        plan = AttentionPlan(self._kv, segments, self._device)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            return plan.attend(0, query, key, value, scale=scale)

        out: Tensor = self.head(torch.tensor(token_ids, device=self._device), hidden, plan.positions, attend)
        return out

    def _pick(self, sequence: Sequence, logits: Tensor, depth: int, tokens: list[int], probs: list[Tensor]) -> None:
        position = sequence.committed + depth
        noise = None
        if sequence.coupled and not sequence.request.params.sampling.greedy:
            noise = gumbel(sequence.seed, [position], self._vocab_size, self._device)[0, self.head.draft_ids]
        row, q = pick(sequence, logits, position, noise)
        tokens.append(self._target_ids[row])
        if q is not None:
            probs.append(q.new_zeros(self._vocab_size).index_copy_(0, self.head.draft_ids, q))
