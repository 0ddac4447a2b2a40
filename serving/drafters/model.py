"""An independent causal LM as a drafter; it shares the target's tokenizer, checked token by token at load.

Its KV row i holds position i of the committed text. A draft that was accepted was read at its true place, so its row
stays valid; rows of rejected drafts lie beyond `DraftState.kv_len` and are written anew.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.drafters.base import DraftJob
from serving.drafters.chains import Chains
from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from shared.errors import ConfigError
from shared.models.paged import PagedModel, Segment
from shared.models.target import LoadedModel


class ModelDrafter:
    """Drafts chains with a whole language model of its own."""

    kind = "model"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: PagedModel, version: str, *, vocab_size: int) -> None:
        self.model, self.version = model, version
        self.max_positions = model.loaded.max_positions
        self._vocab_size = vocab_size

    def swap(self, model: PagedModel, version: str) -> None:
        """Serve another version of the same shape. Sequences in flight keep the KV that the old one wrote."""
        self.model, self.version = model, version

    def commit(self, sequence: Sequence, kept: int, features: Tensor | None) -> None:
        state = sequence.draft
        state.kv_len += min(kept, state.read_ahead)
        state.read_ahead = 0

    def propose(self, jobs: Seq[DraftJob]) -> list[Draft]:
        logits = self._catch_up(jobs)
        chains = Chains(jobs)
        chains.extend(logits)
        while chains.active:
            sequences = [jobs[index].sequence for index in chains.active]
            chains.extend(self._step(sequences, [chains.tokens[index][-1] for index in chains.active]))
        return chains.drafts(self.version, self._vocab_size)

    def _catch_up(self, jobs: Seq[DraftJob]) -> Tensor:  # [jobs, target vocab]
        """Read every committed token that is not read yet; the last one's logits give the first draft."""
        ids: list[int] = []
        segments: list[Segment] = []
        last: list[int] = []
        for job in jobs:
            sequence, state = job.sequence, job.sequence.draft
            ids.extend(sequence.tokens[state.kv_len :])
            segments.append(Segment(sequence.table, state.kv_len, len(sequence.tokens) - state.kv_len))
            last.append(len(ids) - 1)
            state.kv_len, state.read_ahead = len(sequence.tokens), 0
        return self._fit(self.model.forward(ids, segments, last).logits)

    def _step(self, sequences: Seq[Sequence], token_ids: Seq[int]) -> Tensor:  # [sequences, target vocab]
        segments = []
        for sequence in sequences:
            segments.append(Segment(sequence.table, sequence.draft.kv_len + sequence.draft.read_ahead, 1))
            sequence.draft.read_ahead += 1
        return self._fit(self.model.forward(token_ids, segments, range(len(token_ids))).logits)

    def _fit(self, logits: Tensor) -> Tensor:
        """Both vocabularies hold the same tokens; they may be padded to different widths."""
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.cat([logits, logits.new_full((len(logits), missing), float("-inf"))], dim=-1)
        return logits[:, : self._vocab_size]


def check_same_tokens(target: LoadedModel, drafter: LoadedModel) -> None:
    """Raises ConfigError unless both tokenizers give every id the same string and mark the same ids as the end."""
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours != theirs:
        differing = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
        raise ConfigError(
            "drafter.model",
            f"its tokenizer differs from the target's: {differing!r} has id {theirs.get(differing)} in the drafter "
            f"and {ours.get(differing)} in the target ({len(theirs)} and {len(ours)} tokens)",
            "Use a drafter of the same family, one that shares the tokenizer",
        )
    special = {"the target": set(target.tokenizer.all_special_ids), "it": set(drafter.tokenizer.all_special_ids)}
    if special["the target"] != special["it"]:
        raise ConfigError(
            "drafter.model",
            f"its special ids {sorted(special['it'])} are not the target's {sorted(special['the target'])}",
            "Use a drafter of the same family, one that shares the tokenizer",
        )
