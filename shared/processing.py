"""What a request does to logits before temperature and filters, in the one order that p, q and judging share.

1. Masks: ids that pad the vocabulary (the model's forward did it), then `allowed`: grammar and min_tokens.
2. `logit_bias` is added.
3. `repetition_penalty`, for ids of the prompt and of the output so far: a positive logit is divided by it, any other
   multiplied (Keskar et al. 2019, section 4.1).
4. `frequency_penalty` times the id's count in the output so far, and `presence_penalty` if it is there at all, are
   subtracted (OpenAI's API reference).
5. Temperature, top-k, top-p, min-p: `shared.sampling`.

A row is processed as if the drafts before it were committed, so the rows of one round differ. A masked id stays masked
whatever follows. It knows nothing of how a mask came to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.trace import Sampling


@dataclass(frozen=True)
class Vocabulary:
    """The columns of a head that has fewer than the target."""

    ids: Tensor  # [columns] target id of each, ascending
    columns: Tensor  # [largest id + 2] column of each target id, -1 where there is none; the last stands for all larger

    @classmethod
    def of(cls, ids: Tensor) -> Vocabulary:
        columns = torch.full((int(ids.max()) + 2,), -1, device=ids.device)
        columns[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, columns)

    def place(self, ids: Tensor) -> Tensor:
        """The column of each id, -1 where there is none."""
        return self.columns[ids.clamp_max(len(self.columns) - 1)]


@dataclass(frozen=True)
class Contexts:
    """What the penalties of r rows look at: the u distinct ids of one text."""

    ids: Tensor  # [u]
    in_prompt: Tensor  # [u] bool
    counts: Tensor  # [r, u] float32, occurrences in the output before the row's own token

    def since(self, row: int) -> Contexts:
        """Without the rows before."""
        return Contexts(self.ids, self.in_prompt, self.counts[row:])

    def of_rows(self, rows: Tensor) -> Contexts:
        return Contexts(self.ids, self.in_prompt, self.counts[rows])


class History:
    """The distinct tokens of one text, in order of appearance, with their counts in the output."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt_ids))}
        self._prompt = len(self._place)
        self._counts = [0] * self._prompt

    def push(self, token: int) -> None:
        """One token of the output."""
        place = self._place.setdefault(token, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
        self._counts[place] += 1

    def contexts(self, ahead: Sequence[int], device: torch.device | None = None) -> Contexts:
        """len(ahead) + 1 rows; row j as if the first j tokens of `ahead` had been pushed."""
        fresh = [token for token in dict.fromkeys(ahead) if token not in self._place]
        place = {**self._place, **{t: i for i, t in enumerate(fresh, len(self._place))}} if fresh else self._place
        counts = torch.tensor([*self._counts, *[0] * len(fresh)], dtype=torch.float32).repeat(len(ahead) + 1, 1)
        if ahead:
            steps = torch.zeros_like(counts)
            steps[torch.arange(1, len(ahead) + 1), torch.tensor([place[token] for token in ahead])] = 1.0
            counts += steps.cumsum(0)
        ids = torch.tensor(list(place), dtype=torch.long)
        return Contexts(ids.to(device), (torch.arange(len(ids)) < self._prompt).to(device), counts.to(device))


def processed(
    logits: Tensor,  # [rows, columns]
    sampling: Sampling,
    *,
    allowed: Tensor | None = None,  # [rows, ids] bool; ids beyond its width are not allowed
    contexts: Contexts | None = None,  # of the same rows; needed where `sampling.penalises`
    vocabulary: Vocabulary | None = None,  # whose columns these are; None: columns are target ids
) -> Tensor:  # [rows, columns] float32, a new tensor
    """The logits after steps 1 to 4. A row of which nothing is left is -inf throughout."""
    logits = logits.float().clone()
    if allowed is not None:
        logits.masked_fill_(~_columns_of(allowed, logits.shape[1], vocabulary), float("-inf"))
    if sampling.logit_bias:
        ids, amounts = zip(*sampling.logit_bias, strict=True)
        columns, kept = _places(torch.tensor(ids, device=logits.device), logits.shape[1], vocabulary)
        logits[:, columns] += torch.tensor(amounts, device=logits.device, dtype=torch.float32)[kept]
    if sampling.penalises and contexts is not None:
        columns, kept = _places(contexts.ids, logits.shape[1], vocabulary)
        logits[:, columns] = _penalised(
            logits[:, columns], sampling, contexts.in_prompt[kept], contexts.counts[:, kept]
        )
    return logits


def _penalised(logits: Tensor, sampling: Sampling, in_prompt: Tensor, counts: Tensor) -> Tensor:  # [rows, u]
    said = counts > 0
    repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    logits = torch.where(said | in_prompt, repeated, logits)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * said


def _places(ids: Tensor, width: int, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Columns of those ids that have one, and which ids these are ([u] bool)."""
    columns = ids if vocabulary is None else vocabulary.place(ids)
    kept = (columns >= 0) & (columns < width)
    return columns[kept], kept


def _columns_of(allowed: Tensor, width: int, vocabulary: Vocabulary | None) -> Tensor:  # [rows, ids] -> [rows, width]
    wanted = width if vocabulary is None else int(vocabulary.ids[-1]) + 1
    missing = wanted - allowed.shape[1]
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing), value=False)
    return allowed[:, :width] if vocabulary is None else allowed[:, vocabulary.ids]
