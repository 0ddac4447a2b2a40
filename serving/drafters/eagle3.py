"""The EAGLE-3 head as a drafter: catches up with true features, then feeds itself.

Its KV row i holds position i computed from the target's own features; rows that it fed to itself lie beyond
`DraftState.kv_len` and are written anew in the next round. Draft token probabilities live in the draft vocabulary and
are spread over the target's only where a sampled request needs them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.drafters.base import DraftJob, concat
from serving.drafters.chains import Chains
from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from shared.models.eagle3_served import ServedHead
from shared.models.graphs import CudaRecorder, Recorder, StepGraphs
from shared.models.paged import AttentionPlan, PagedKV, Segment
from shared.processing import Vocabulary


class Eagle3Drafter:
    """Drafts chains with a `ServedHead`."""

    kind = "eagle3"

    def __init__(
        self,
        head: ServedHead,
        version: str,
        kv: PagedKV,
        *,
        vocab_size: int,
        device: torch.device,
        recorder: Recorder | None = None,  # of draft steps; on CUDA there is one anyway
    ) -> None:
        self.head, self.version, self._kv = head, version, kv
        self.feature_layers = head.config.feature_layers
        self.max_positions = head.config.max_positions
        self._vocab_size, self._device = vocab_size, device
        self._vocabulary = Vocabulary.of(head.draft_ids)
        if recorder is None and device.type == "cuda":
            recorder = CudaRecorder()
        self._graphs = None if recorder is None else StepGraphs(self._record, kv, self.max_positions, device, recorder)

    def swap(self, head: ServedHead, version: str) -> None:
        """Serve another version of the same shape. Sequences in flight keep the KV that the old one wrote."""
        if self._graphs is None:
            self.head = head
        else:
            self.head.copy_(head)  # recorded steps read these tensors
        self.version = version
        self._vocabulary = Vocabulary.of(head.draft_ids)

    def commit(self, sequence: Sequence, kept: int, features: Tensor | None) -> None:
        assert features is not None, "the engine hands over the layers that the head asks for"
        if sequence.request.params.speculative:
            # A copy: the rows are a view that would keep those of the whole step alive until the next draft.
            sequence.draft.features.append(features.clone())

    @torch.inference_mode()
    def propose(self, jobs: Seq[DraftJob]) -> list[Draft]:
        hidden = self._catch_up(jobs)
        chains, depth = Chains(jobs, self._vocabulary), 0
        while chains.active:
            going = chains.extend(self.head.logits(hidden).float())  # [active, draft_vocab]
            depth += 1
            if going:
                drafting = [jobs[index] for index in chains.active]
                last = [chains.tokens[index][-1] for index in chains.active]
                hidden = self._step(drafting, last, hidden[going], depth)
        return chains.drafts(self.version, self._vocab_size)

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
        return self._run(ids, self.head.fuse(concat(features)), segments)[last]

    def _step(self, jobs: Seq[DraftJob], token_ids: Seq[int], hidden: Tensor, depth: int) -> Tensor:
        segments = [Segment(job.sequence.table, job.sequence.kv_len + depth - 1, 1) for job in jobs]
        return self._run(token_ids, hidden, segments)

    def _record(self, plan: AttentionPlan, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, hidden = inputs
        return (self.head.forward(ids, hidden, plan),)

    def _run(self, token_ids: Seq[int], hidden: Tensor, segments: Seq[Segment]) -> Tensor:  # [tokens, hidden]
        ids = torch.tensor(token_ids, device=self._device)
        if self._graphs is not None and self._graphs.fits(segments):
            return self._graphs.run(segments, (ids, hidden))[0]
        return self.head.forward(ids, hidden, AttentionPlan(self._kv, segments, self._device))
