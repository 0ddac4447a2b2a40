"""From one step's logits to what each request gained: applies each request's own rule to its rows.

Greedy and seeded requests compare picks, the others reject and recover; all of them in one batch each. It reads no
state but the sequences' parameters, and writes none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from serving.spec.noise import Role, gumbel, uniform
from serving.spec.verify import RoundNoise, Verdict, verify_coupled, verify_rejection
from shared.sampling import filtered_probs


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
    probs: tuple[float, ...]  # p of each after the request's filters
    accepted: int
    rejected: tuple[int, float] | None  # the draft that fell, and its q


def decide(candidates: Seq[Candidate], logits: Tensor) -> list[Outcome]:  # logits [rows, vocab]
    """One outcome for each candidate, in order."""
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


def _decide_greedy(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    rows = [row for candidate in candidates for row in candidate.rows]
    whole = len(rows) == len(logits)  # nothing else in the batch: spare the copy
    picks = (logits if whole else logits[rows]).argmax(-1)
    verdict = _couple(candidates, list(torch.split(picks, [len(c.rows) for c in candidates])))
    return {
        id(candidate): _outcome(candidate, accepted, final, [1.0] * (accepted + 1))
        for candidate, accepted, final in _each(candidates, verdict)
    }


def _decide_seeded(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    picks, probs = [], []
    for candidate in candidates:
        p = filtered_probs(
            logits[candidate.rows.start : candidate.rows.stop], candidate.sequence.request.params.sampling
        )
        noise = gumbel(candidate.sequence.seed, candidate.positions, p.shape[1], p.device)
        picks.append((p.log() + noise).argmax(-1))
        probs.append(p.gather(1, picks[-1][:, None]).squeeze(1).tolist())
    return {
        id(candidate): _outcome(candidate, accepted, final, probs[index][: accepted + 1])
        for index, (candidate, accepted, final) in enumerate(_each(candidates, _couple(candidates, picks)))
    }


def _couple(candidates: Seq[Candidate], picks: list[Tensor]) -> Verdict:
    device = picks[0].device
    lengths = torch.tensor([candidate.gamma for candidate in candidates], device=device)
    padded = torch.nn.utils.rnn.pad_sequence(picks, batch_first=True)  # [b, gamma + 1]
    return verify_coupled(padded, _draft_ids(candidates, padded.shape[1] - 1, device), lengths)


def _decide_drawn(candidates: Seq[Candidate], logits: Tensor) -> dict[int, Outcome]:
    device, vocab = logits.device, logits.shape[1]
    gamma = max(candidate.gamma for candidate in candidates)
    p = logits.new_zeros((len(candidates), gamma + 1, vocab))
    q = logits.new_zeros((len(candidates), gamma, vocab))
    draft_ids = _draft_ids(candidates, gamma, device)
    for index, candidate in enumerate(candidates):
        rows = logits[candidate.rows.start : candidate.rows.stop]
        p[index, : len(rows)] = filtered_probs(rows, candidate.sequence.request.params.sampling)
        if candidate.draft is not None and candidate.draft.probs is not None:
            q[index, : candidate.gamma] = candidate.draft.probs
        elif candidate.draft is not None:
            q[index, : candidate.gamma].scatter_(1, draft_ids[index, : candidate.gamma, None], 1.0)
    lengths = torch.tensor([candidate.gamma for candidate in candidates], device=device)
    verdict = verify_rejection(p, q, draft_ids, lengths, _noise(candidates, gamma, device))
    found = {}
    for index, (candidate, accepted, final) in enumerate(_each(candidates, verdict)):
        ids = [*draft_ids[index, :accepted].tolist(), final]
        probs = p[index, range(accepted + 1), ids].tolist()
        fallen = float(q[index, accepted, draft_ids[index, accepted]]) if accepted < candidate.gamma else 1.0
        found[id(candidate)] = _outcome(candidate, accepted, final, probs, fallen)
    return found


def _noise(candidates: Seq[Candidate], gamma: int, device: torch.device) -> RoundNoise:
    seeds = [candidate.sequence.seed for candidate in candidates for _ in range(gamma + 1)]
    starts = [candidate.sequence.committed for candidate in candidates]
    positions = [start + offset for start in starts for offset in range(gamma + 1)]

    def of(role: Role) -> Tensor:
        return uniform(seeds, positions, role).view(len(candidates), gamma + 1).to(device)

    return RoundNoise(of(Role.ACCEPT)[:, :gamma], of(Role.RECOVER), of(Role.BONUS))


def _draft_ids(candidates: Seq[Candidate], gamma: int, device: torch.device) -> Tensor:  # [b, gamma]
    rows = [[*(c.draft.token_ids if c.draft else ()), *[0] * (gamma - c.gamma)] for c in candidates]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(candidates), gamma)


def _each(candidates: Seq[Candidate], verdict: Verdict) -> list[tuple[Candidate, int, int]]:
    return list(zip(candidates, verdict.accepted.tolist(), verdict.final.tolist(), strict=True))


def _outcome(candidate: Candidate, accepted: int, final: int, probs: Seq[float], fallen: float = 1.0) -> Outcome:
    drafts = candidate.draft.token_ids if candidate.draft else ()
    rejected = (drafts[accepted], fallen) if accepted < len(drafts) else None
    return Outcome((*drafts[:accepted], final), tuple(probs), accepted, rejected)
