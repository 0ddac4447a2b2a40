"""The chains that one round drafts for many requests at a time: picks, and when each chain ends.

Owns the tokens and the distributions that drew them, level by level; the drafter owns how logits come about. Greedy
rows are one argmax, seeded rows meet the noise that the target will use for the ids of their columns, the others are
drawn together. A chain ends early only by its contexts (law 2): where they leave the drafter's columns nothing to say,
or behind a token, when the drafter was too unsure of the contexts up to it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.drafters.base import DraftJob
from serving.spec.draft import Draft
from serving.spec.noise import Role, uniform
from serving.spec.pick import coupled_picks, probs_by_rows
from serving.spec.verify import draw
from shared.processing import Vocabulary
from shared.sampling import largest


class Chains:
    """Chains of one round. `active` are the jobs, by index, whose next token is due; a level has a row for each."""

    def __init__(self, jobs: Seq[DraftJob], vocabulary: Vocabulary | None = None) -> None:
        self._jobs, self._vocabulary = jobs, vocabulary
        self.tokens: list[list[int]] = [[] for _ in jobs]  # target ids
        self._probs: list[list[Tensor]] = [[] for _ in jobs]  # [columns] each, of drawn requests
        self._asked = any(job.least > 0 for job in jobs)
        self._chance = [1.0] * len(jobs)  # product of the largest probabilities of the contexts drawn from
        self.active = list(range(len(jobs)))

    def extend(self, logits: Tensor) -> list[int]:  # [active, columns]
        """Pick one token for every active chain. Returns the rows of those that go on, which are active now."""
        picks = self._pick(logits)
        sure = _sureness(logits) if self._asked else []
        going = []
        for row, index in enumerate(self.active):
            if picks[row] is None:
                continue
            self.tokens[index].append(picks[row])  # type: ignore[arg-type]
            if self._asked:
                self._chance[index] *= sure[row]
            job = self._jobs[index]
            if len(self.tokens[index]) < job.gamma and self._chance[index] >= job.least:
                going.append(row)
        self.active = [self.active[row] for row in going]
        return going

    def drafts(self, version: str, vocab_size: int) -> list[Draft]:
        """One for each job, in order."""
        return [
            Draft.chain(tokens, self._spread(rows, vocab_size) if rows else None, version, self._chance_of(index))
            for index, (tokens, rows) in enumerate(zip(self.tokens, self._probs, strict=True))
        ]

    def _chance_of(self, index: int) -> float | None:
        return self._chance[index] if self._asked and self._jobs[index].least > 0 else None

    def _pick(self, logits: Tensor) -> list[int | None]:  # [active, columns] -> target ids
        logits, open_ = self._processed(logits)
        sequences = [self._jobs[index].sequence for index in self.active]
        greedy = [row for row in open_ if sequences[row].request.params.sampling.greedy]
        coupled = [row for row in open_ if sequences[row].coupled and row not in greedy]
        drawn = [row for row in open_ if not sequences[row].coupled]
        columns = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        if greedy:
            columns[greedy] = largest(_some(logits, greedy))
        if coupled:
            columns[coupled] = self._coupled(logits, coupled)
        if drawn:
            columns[drawn] = self._drawn(logits, drawn)
        ids = columns if self._vocabulary is None else self._vocabulary.ids[columns]
        found, may = ids.tolist(), set(open_)
        return [found[row] if row in may else None for row in range(len(found))]

    def _processed(self, logits: Tensor) -> tuple[Tensor, list[int]]:
        """The logits as the requests want them, and the rows in which anything is left."""
        rows = list(range(len(self.active)))
        asking = [row for row in rows if self._jobs[self.active[row]].sequence.processing is not None]
        if not asking:
            return logits, rows
        logits = logits.clone()
        for row in asking:
            index = self.active[row]
            processing = self._jobs[index].sequence.processing
            assert processing is not None
            logits[row] = processing.draft_row(logits[row : row + 1], self.tokens[index], self._vocabulary)[0]
        mute = {row for row in asking if not bool((logits[row] > float("-inf")).any())}
        return logits, [row for row in rows if row not in mute]

    def _addresses(self, rows: Seq[int]) -> tuple[list[int], list[int]]:
        """Seeds and committed positions of the picks."""
        indices = [self.active[row] for row in rows]
        sequences = [self._jobs[index].sequence for index in indices]
        positions = [s.committed + len(self.tokens[i]) for s, i in zip(sequences, indices, strict=True)]
        return [sequence.seed for sequence in sequences], positions

    def _filtered(self, logits: Tensor, rows: Seq[int]) -> Tensor:  # [rows, columns]
        samplings = [self._jobs[self.active[row]].sequence.request.params.sampling for row in rows]
        return probs_by_rows(_some(logits, rows), samplings)

    def _coupled(self, logits: Tensor, rows: Seq[int]) -> Tensor:  # [rows]
        ids = None if self._vocabulary is None else self._vocabulary.ids
        return coupled_picks(self._filtered(logits, rows), *self._addresses(rows), ids)

    def _drawn(self, logits: Tensor, rows: Seq[int]) -> Tensor:  # [rows]
        probs = self._filtered(logits, rows)
        for row, q in zip(rows, probs, strict=True):
            self._probs[self.active[row]].append(q)
        return draw(probs, uniform(*self._addresses(rows), Role.DRAFT))

    def _spread(self, rows: Seq[Tensor], vocab_size: int) -> Tensor:  # [drafts, vocab]
        probs = torch.stack(list(rows))
        if self._vocabulary is None:
            return probs
        return probs.new_zeros((len(rows), vocab_size)).index_copy_(1, self._vocabulary.ids, probs)


def _some(logits: Tensor, rows: Seq[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _sureness(logits: Tensor) -> list[float]:  # [rows, columns] -> [rows]
    """The largest probability of each row, before any request's own processing."""
    found: list[float] = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
    return found
