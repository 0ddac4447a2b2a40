"""What one running request does to logits beyond temperature and filters; most requests have none of it.

Owns the state that this needs: which tokens were said, where the grammar stands, how many tokens are still owed before
the end is allowed. It moves with committed tokens only. Rows of drafts, the drafter's and the target's alike, are
processed as if the drafts before them were committed (`shared.processing` owns the order).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.engine.grammar import GrammarState
from serving.engine.request import GenerationRequest
from shared.processing import History, Vocabulary, processed


class Processing:
    """State of one request. `ends` are the ids that are masked until `min_tokens` are there."""

    def __init__(self, request: GenerationRequest, ends: frozenset[int], grammar: GrammarState | None) -> None:
        params = request.params
        self.grammar = grammar
        self._sampling = params.sampling
        self._history = History(request.prompt_ids) if params.sampling.penalises else None
        self._ends, self._owed = sorted(ends), params.min_tokens if ends else 0

    @classmethod
    def of(cls, request: GenerationRequest, ends: frozenset[int], grammar: GrammarState | None) -> Processing | None:
        """None for a request that needs nothing."""
        processing = cls(request, ends, grammar)
        return processing if grammar or processing._owed or request.params.sampling.processes else None

    def push(self, token: int) -> None:
        """One committed token."""
        self._owed = max(0, self._owed - 1)
        if self._history is not None:
            self._history.push(token)
        if self.grammar is not None:
            self.grammar.push(token)

    def target_rows(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:  # [drafts + 1, vocab]
        """The target's rows of one round."""
        return self._rows(logits, drafts, 0, None)

    def draft_row(self, logits: Tensor, drafts: Sequence[int], vocabulary: Vocabulary | None) -> Tensor:  # [1, columns]
        """The drafter's row behind `drafts`; -inf throughout when its columns hold nothing that may follow."""
        return self._rows(logits, drafts, len(drafts), vocabulary)

    def _rows(self, logits: Tensor, drafts: Sequence[int], first: int, vocabulary: Vocabulary | None) -> Tensor:
        contexts = None
        if self._history is not None:
            contexts = self._history.contexts(drafts, logits.device).since(first)
        allowed = self._allowed(drafts, first, logits.shape[1] if vocabulary is None else int(vocabulary.ids[-1]) + 1)
        if allowed is not None:
            allowed = allowed.to(logits.device)
        return processed(logits, self._sampling, allowed=allowed, contexts=contexts, vocabulary=vocabulary)

    def _allowed(self, drafts: Sequence[int], first: int, width: int) -> Tensor | None:  # [rows, width] bool
        """None when nothing is masked in any row."""
        masks: list[Tensor | None] = [None] * (len(drafts) + 1 - first)
        if self.grammar is not None:
            masks = self.grammar.masks(drafts)[first:]
        owing = [first + row < self._owed for row in range(len(masks))]
        if not any(owing) and not any(mask is not None for mask in masks):
            return None
        allowed = torch.ones((len(masks), width), dtype=torch.bool)
        for row, mask in enumerate(masks):
            if mask is not None:
                allowed[row, len(mask) :] = False
                allowed[row, : len(mask)] = mask[:width]
            if owing[row]:
                self._mask_ends(allowed[row])
        return allowed

    def _mask_ends(self, allowed: Tensor) -> None:  # [width]
        """In place; where a finished grammar leaves nothing but the end, the end stays."""
        before = allowed.clone()
        allowed[[token for token in self._ends if token < len(allowed)]] = False
        if not allowed.any():
            allowed.copy_(before)
