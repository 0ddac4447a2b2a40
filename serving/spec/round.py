"""From one step's logits to what each request gained: applies each request's own rule to its rows.

Rows are processed first, each as if the drafts before it were committed. Then greedy and seeded requests compare picks,
the others reject and recover; all of them in one batch each. It reads the sequences' parameters and their processing
state, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from serving.spec.noise import Role, uniform
from serving.spec.pick import coupled_picks, probs_by_rows
from serving.spec.verify import Verdict, final_tokens, keeps, verify_coupled
from shared.sampling import largest


@dataclass(frozen=True)
class Candidate:
    """A request whose rows first .. first+gamma of the step's logits are to be decided."""

    sequence: Sequence
    draft: Draft | None
    first: int

    @property
    def gamma(self) -> int:
        return self.draft.gamma if self.draft else 0

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.gamma + 1)

    @property
    def positions(self) -> range:
        """The committed positions that the rows decide."""
        return range(self.sequence.committed, self.sequence.committed + self.gamma + 1)


@dataclass(frozen=True)
class Outcome:
    """Tokens gained, in order: the accepted drafts and one more."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]  # p of each after the request's processing and filters
    accepted: int
    rejected: tuple[int, float] | None  # the draft that fell, and its q


def decide(candidates: Seq[Candidate], logits: Tensor) -> list[Outcome]:  # logits [rows, vocab], left as they are
    """One outcome for each candidate, in order."""
    logits = _processed(candidates, logits)
    outcomes: dict[int, Outcome] = {}
    greedy = [c for c in candidates if c.sequence.request.params.sampling.greedy]
    seeded = [c for c in candidates if c.sequence.coupled and not c.sequence.request.params.sampling.greedy]
    drawn = [c for c in candidates if not c.sequence.coupled]
    if greedy:
        outcomes.update(_decide_greedy(greedy, logits))
    if seeded:
        outcomes.update(_decide_seeded(seeded, logits))
    if drawn:
        outcomes.update(_decide_drawn(drawn, logits))
    return [outcomes[id(candidate)] for candidate in candidates]


def _processed(candidates: Seq[Candidate], logits: Tensor) -> Tensor:
    """The same tensor when nobody asks for more than temperature and filters."""
    asking = [candidate for candidate in candidates if candidate.sequence.processing is not None]
    if not asking:
        return logits
    logits = logits.clone()  # the raw rows are still to be recorded
    for candidate in asking:
        assert candidate.sequence.processing is not None
        rows = slice(candidate.rows.start, candidate.rows.stop)
        drafts = candidate.draft.token_ids if candidate.draft else ()
        logits[rows] = candidate.sequence.processing.target_rows(logits[rows], drafts)
    return logits


def _rows_of(candidates: Seq[Candidate], logits: Tensor) -> Tensor:  # [rows of the candidates, vocab]
    rows = [row for candidate in candidates for row in candidate.rows]
    return logits if len(rows) == len(logits) else logits[rows]  # nothing else in the batch: spare the copy


def _probs_of(candidates: Seq[Candidate], logits: Tensor) -> Tensor:  # [rows of the candidates, vocab]
    samplings = [candidate.sequence.request.params.sampling for candidate in candidates for _ in candidate.rows]
    return probs_by_rows(_rows_of(candidates, logits), samplings)


def _decide_greedy(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    picks = largest(_rows_of(candidates, logits))
    return {
        id(candidate): _outcome(candidate, accepted, final, [1.0] * (accepted + 1))
        for candidate, accepted, final in _each(candidates, _couple(candidates, picks))
    }


def _decide_seeded(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    p = _probs_of(candidates, logits)
    seeds = [candidate.sequence.seed for candidate in candidates for _ in candidate.rows]
    picks = coupled_picks(p, seeds, [position for candidate in candidates for position in candidate.positions])
    probs, first, found = p.gather(1, picks[:, None]).squeeze(1).tolist(), 0, {}
    for candidate, accepted, final in _each(candidates, _couple(candidates, picks)):
        found[id(candidate)] = _outcome(candidate, accepted, final, probs[first : first + accepted + 1])
        first += len(candidate.rows)
    return found


def _couple(candidates: Seq[Candidate], picks: Tensor) -> Verdict:  # picks [rows of the candidates]
    lengths = torch.tensor([candidate.gamma for candidate in candidates], device=picks.device)
    parts = torch.split(picks, [len(candidate.rows) for candidate in candidates])
    padded = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)  # [b, gamma + 1]
    return verify_coupled(padded, _draft_ids(candidates, padded.shape[1] - 1, picks.device), lengths)


def _draft_ids(candidates: Seq[Candidate], gamma: int, device: torch.device) -> Tensor:  # [b, gamma]
    rows = [[*(c.draft.token_ids if c.draft else ()), *[0] * (gamma - c.gamma)] for c in candidates]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(candidates), gamma)


def _each(candidates: Seq[Candidate], verdict: Verdict) -> list[tuple[Candidate, int, int]]:
    return list(zip(candidates, verdict.accepted.tolist(), verdict.final.tolist(), strict=True))


def _decide_drawn(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    p = _probs_of(candidates, logits)  # [rows, vocab]
    firsts = [0]
    for candidate in candidates:
        firsts.append(firsts[-1] + len(candidate.rows))
    accepted, q = _accepted(candidates, p, firsts)
    rows = p[[first + kept for first, kept in zip(firsts, accepted, strict=False)]]  # [b, vocab] that decide the end
    fallen = [kept < candidate.gamma for candidate, kept in zip(candidates, accepted, strict=True)]
    final = final_tokens(rows, _rejected_q(candidates, accepted, rows), _final_noise(candidates, accepted, fallen, p))
    ids = [
        [*(c.draft.token_ids[:kept] if c.draft else ()), token]
        for c, kept, token in zip(candidates, accepted, final.tolist(), strict=True)
    ]
    places = [first + j for first, tokens in zip(firsts, ids, strict=False) for j in range(len(tokens))]
    probs = iter(p[places, [token for tokens in ids for token in tokens]].tolist())
    return {
        id(candidate): _outcome(
            candidate, kept, tokens[-1], [next(probs) for _ in tokens], q[index][kept] if fallen[index] else 1.0
        )
        for index, (candidate, kept, tokens) in enumerate(zip(candidates, accepted, ids, strict=True))
    }


def _accepted(candidates: Seq[Candidate], p: Tensor, firsts: Seq[int]) -> tuple[list[int], list[list[float]]]:
    """How many drafts of each request are kept, and q of all its drafts."""
    drafting = [(c, c.draft, first) for c, first in zip(candidates, firsts, strict=False) if c.draft and c.gamma]
    if not drafting:
        return [0] * len(candidates), [[]] * len(candidates)
    q = torch.cat([_q_of(draft, p) for _, draft, _ in drafting])
    ids = [token for _, draft, _ in drafting for token in draft.token_ids]
    rows = [first + j for _, draft, first in drafting for j in range(draft.gamma)]
    seeds = [c.sequence.seed for c, draft, _ in drafting for _ in range(draft.gamma)]
    positions = [c.sequence.committed + j for c, draft, _ in drafting for j in range(draft.gamma)]
    kept = iter(keeps(p[rows, ids], q, uniform(seeds, positions, Role.ACCEPT).to(p.device)).tolist())
    shares = iter(q.tolist())
    accepted, drawn = [], []
    for candidate in candidates:
        verdicts = [next(kept) for _ in range(candidate.gamma)]
        accepted.append(verdicts.index(False) if False in verdicts else len(verdicts))
        drawn.append([next(shares) for _ in range(candidate.gamma)])
    return accepted, drawn


def _q_of(draft: Draft, p: Tensor) -> Tensor:  # [drafts]
    if draft.probs is None:
        return p.new_ones(draft.gamma)
    return draft.probs[range(draft.gamma), list(draft.token_ids)]


def _rejected_q(candidates: Seq[Candidate], accepted: Seq[int], like: Tensor) -> Tensor:  # [b, vocab]
    """q at the draft that fell; 0 where none did."""
    q = torch.zeros_like(like)
    for index, (candidate, kept) in enumerate(zip(candidates, accepted, strict=True)):
        if candidate.draft is None or kept == candidate.gamma:
            continue
        if candidate.draft.probs is None:
            q[index, candidate.draft.token_ids[kept]] = 1.0
        else:
            q[index] = candidate.draft.probs[kept]
    return q


def _final_noise(candidates: Seq[Candidate], accepted: Seq[int], fallen: Seq[bool], like: Tensor) -> Tensor:  # [b]
    seeds = [candidate.sequence.seed for candidate in candidates]
    positions = [c.sequence.committed + kept for c, kept in zip(candidates, accepted, strict=True)]
    recover, bonus = (uniform(seeds, positions, role) for role in (Role.RECOVER, Role.BONUS))
    return torch.where(torch.tensor(fallen), recover, bonus).to(like.device)


def _outcome(candidate: Candidate, accepted: int, final: int, probs: Seq[float], fallen: float = 1.0) -> Outcome:
    drafts = candidate.draft.token_ids if candidate.draft else ()
    rejected = (drafts[accepted], fallen) if accepted < len(drafts) else None
    return Outcome((*drafts[:accepted], final), tuple(probs), accepted, rejected)
