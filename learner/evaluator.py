"""What a drafter would have earned on recorded requests, without serving them again.

q of each committed token, after the request's own penalties, bias and filters, against the recorded p gives its
acceptance; see `shared.acceptance` for why that is unbiased on all committed positions. Any drafter version can be
judged on any recorded traffic but that which a grammar or min_tokens constrained: its masks are not in the record.
It knows nothing of promotion, and returns counts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.example import Batch, Example, pack, row_count
from learner.unroll import DepthRows, Drafter, shift_of, unroll, vocabulary_of
from shared.acceptance import Expected, acceptance_of_committed, of_rounds, replay
from shared.processing import Contexts, History, Vocabulary, processed
from shared.sampling import filtered_probs
from shared.trace import Sampling, TraceRecord

_ROWS_AT_ONCE = 2048  # padded rows of a batch
_LOGITS_AT_ONCE = 4 * 2**20
# A deep draft that is reached less often than this is taken as rejected: it spares most of the projections, and moves
# a request's expected counts by less than this per position.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class Judged:
    """One request. Sums, never ratios: a set's alpha is sum(accepted) / sum(tested)."""

    id: str
    domain: str
    seeded: bool  # accepts by coupling, a little less often than this estimate: count it apart
    positions: int  # committed positions from 1 on; 0 when constrained
    first: float  # acceptances at depth 1, summed over all `positions`
    accepted: float  # expected, had rounds of gamma drafts served the request from position 1 on
    tested: float
    steps: float
    rounds_accepted: float = 0.0  # expected of the rounds that really served the request, had this drafter drafted them
    rounds_tested: float = 0.0
    constrained: bool = False  # by masks that are not in the record: not judged


@torch.no_grad()
def judge(
    drafter: Drafter,
    examples: Sequence[Example],
    gamma: int,
    *,
    token_count: int = 0,
    bf16: bool = False,
) -> list[Judged]:
    """One Judged for each example, in order.

    `token_count` (0: all) masks the padding at the end of a language model's vocabulary, as serving does.
    bf16 halves the time and moves alpha by less than a hundredth; leave it off for figures that are shown.
    Raises TraceError when a head's features do not fit their record.
    """
    shift, vocabulary = shift_of(drafter), vocabulary_of(drafter)
    device = next(drafter.parameters()).device
    was_training = drafter.training
    drafter.eval()
    nothing = np.zeros((1, 0))  # a request of one token was never drafted for
    found = {
        i: _judged(example, nothing, gamma)
        for i, example in enumerate(examples)
        if len(example.record.output_ids) < 2 or example.record.sampling.constrained
    }
    rows = {i: row_count(example.record, shift) for i, example in enumerate(examples) if i not in found}
    for indices in _batches(rows):
        chosen = [examples[i] for i in indices]
        batch = pack(chosen, shift=shift, judging=True).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            depths = unroll(drafter, batch, max(gamma, _longest_draft(chosen), 1))
        judge_rows = _RowJudge(chosen, batch, vocabulary, token_count, bf16)
        by_depth = judge_rows.acceptance(depths)  # [depths, m]
        owner = batch.example.cpu().numpy()
        for place, index in enumerate(indices):
            found[index] = _judged(chosen[place], by_depth[:, owner == place], gamma)
    drafter.train(was_training)
    return [found[i] for i in range(len(examples))]


def _batches(rows: Mapping[int, int]) -> Iterator[list[int]]:
    """Indices of similar length, at most `_ROWS_AT_ONCE` padded rows together."""
    group: list[int] = []
    for i in sorted(rows, key=lambda i: rows[i]):
        if group and (len(group) + 1) * rows[i] > _ROWS_AT_ONCE:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _judged(example: Example, by_depth: NDArray[np.float64], gamma: int) -> Judged:  # [depths, n - 1]
    record, positions = example.record, by_depth.shape[1]
    # Depth j + 1 of a round that starts at s stands at s + j; a language model's one depth stands for all.
    deepest = max(gamma, _longest_draft([example]))
    acceptance = np.zeros((positions, deepest))
    for j in range(min(deepest, positions)):
        acceptance[: positions - j, j] = by_depth[min(j, len(by_depth) - 1), j:]
    expected = replay(acceptance[:, :gamma]) if positions else Expected(0.0, 0.0, 0.0)
    rounds = of_rounds(
        acceptance, [(round_.start - 1, len(round_.drafted)) for round_ in record.rounds if round_.drafted]
    )
    return Judged(
        id=record.id,
        domain=record.domain,
        seeded=record.sampling.seeded,
        positions=positions,
        first=float(by_depth[0].sum()),
        accepted=expected.accepted,
        tested=expected.tested,
        steps=expected.steps,
        rounds_accepted=rounds[0],
        rounds_tested=rounds[1],
        constrained=record.sampling.constrained,
    )


def _longest_draft(examples: Sequence[Example]) -> int:
    return max((len(round_.drafted) for example in examples for round_ in example.record.rounds), default=0)


class _RowJudge:
    """Acceptance of the committed token at each wanted row of one batch."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch: Batch,
        vocabulary: Vocabulary | None,
        token_count: int,
        bf16: bool,
    ) -> None:
        owner, committed = batch.example.cpu().numpy(), batch.committed.cpu().numpy()
        self._committed = committed  # [m]
        self._p = np.array(
            [examples[e].record.probs[t] for e, t in zip(owner, committed, strict=True)], dtype=np.float64
        )
        ids = torch.tensor(
            [int(examples[e].record.output_ids[t]) for e, t in zip(owner, committed, strict=True)],
            device=batch.row.device,
            dtype=torch.long,
        )
        self._columns = ids if vocabulary is None else vocabulary.place(ids)  # [m]
        self._vocabulary, self._positions, self._example = vocabulary, batch.committed, batch.example
        self._processing = {
            index: (example.record.sampling, _contexts(example.record, ids.device))
            for index, example in enumerate(examples)
            if example.record.sampling.processes
        }
        samplings = list(dict.fromkeys(example.record.sampling for example in examples))
        number = np.array([samplings.index(example.record.sampling) for example in examples])
        self._samplings: list[Sampling] = samplings
        self._sampling = torch.from_numpy(number).to(ids.device)[batch.example]  # [m] index into `_samplings`
        self._token_count, self._bf16 = token_count, bf16

    def acceptance(self, depths: Sequence[DepthRows]) -> NDArray[np.float64]:  # [depths, m]
        found = np.zeros((len(depths), len(self._p)))
        reach = np.ones(len(self._p))
        for k, depth in enumerate(depths):
            # A round needs its start at position 1 or later: depth k + 1 stands at position k + 1 or later.
            reach = np.where(self._committed >= k + 1, reach, 0.0)
            picks = depth.picks.cpu().numpy()
            needed = reach[picks] > _NEGLIGIBLE
            rows = picks[needed]
            q = self._q(depth, torch.from_numpy(np.flatnonzero(needed)), torch.from_numpy(rows))
            found[k, rows] = acceptance_of_committed(q, self._p[rows])
            # Rows of a request follow each other by position, so the draft after row m is at row m + 1.
            reach = np.concatenate([[0.0], (reach * found[k])[:-1]])
        return found

    def _q(self, depth: DepthRows, places: Tensor, rows: Tensor) -> NDArray[np.float64]:
        """q of the committed token at `rows` of the batch, which are `places` of the depth."""
        device = depth.hidden.device
        q = torch.zeros(len(rows), device=device)
        size = max(_LOGITS_AT_ONCE // depth.vocab, 16)
        for first in range(0, len(rows), size):
            mine = rows[first : first + size].to(device)
            hidden = depth.hidden[places[first : first + size].to(device)]
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16):
                logits = depth.project(hidden)
            q[first : first + size] = self._q_of_rows(logits.float(), mine)
        return q.cpu().numpy().astype(np.float64)

    def _q_of_rows(self, logits: Tensor, rows: Tensor) -> Tensor:  # [r, vocab], [r] -> [r]
        if self._token_count:
            logits[:, self._token_count :] = float("-inf")
        for index, (sampling, contexts) in self._processing.items():
            mine = self._example[rows] == index
            seen = contexts.of_rows(self._positions[rows[mine]]) if contexts is not None else None
            logits[mine] = processed(logits[mine], sampling, contexts=seen, vocabulary=self._vocabulary)
        columns = self._columns[rows]
        # The drafter never draws what it has no column for.
        drawable = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(drawable, columns, 0)
        q = torch.zeros(len(rows), device=logits.device)
        kinds = self._sampling[rows]
        for number in sorted(set(kinds.tolist())):
            mine = kinds == number
            probs = filtered_probs(logits[mine], self._samplings[number])
            q[mine] = probs.gather(1, columns[mine].unsqueeze(1)).squeeze(1)
        return q.masked_fill_(~drawable, 0.0)


def _contexts(record: TraceRecord, device: torch.device) -> Contexts | None:
    """What the request's penalties saw at each committed position; None when it had none."""
    if not record.sampling.penalises:
        return None
    return History(record.prompt_ids.tolist()).contexts(record.output_ids[:-1].tolist(), device)
