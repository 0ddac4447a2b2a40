"""Law 1 and 2 at their heart: what verification emits has exactly the target's joint distribution, whatever q is.

A trial drafts from q, verifies, and completes the round's tokens from p to a fixed length; the joint of all positions
is compared with the product of the target's conditionals. p and q at a position depend on the tokens before it. The
noise is the product's own, so that two roles or positions that shared a stream would show too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.spec.noise import Role, uniform
from serving.spec.verify import Verdict, draw, verify_coupled
from tests.laws.chi_square import ALARM, CAUGHT, p_value
from tests.rejection import RoundNoise, verify_rejection

Verify = Callable[[Tensor, Tensor, Tensor, Tensor, RoundNoise], Verdict]


@dataclass(frozen=True)
class Tables:
    """p and q of each position, by the class (token mod `classes`) of the two tokens before it."""

    p: Tensor  # [positions, classes, classes, vocab]
    q: Tensor

    @property
    def classes(self) -> int:
        return self.p.shape[1]

    @property
    def vocab(self) -> int:
        return self.p.shape[-1]


def adversarial(vocab: int, positions: int, *, classes: int = 16, seed: int = 0, sharp: float = 1.5) -> Tables:
    """q prefers what p does not: it is p's own probabilities handed to other tokens in reverse order, with some tokens
    that q never proposes and some that p never takes."""
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(positions, classes, classes, vocab, generator=noise, dtype=torch.float64) * sharp
    p = logits.softmax(-1)
    ranked = p.sort(-1)
    q = torch.zeros_like(p).scatter_(-1, ranked.indices, ranked.values.flip(-1))
    p[..., 1] = 0  # drafted, never accepted
    q[..., 2] = 0  # reached by rejection and bonus only
    return Tables((p / p.sum(-1, keepdim=True)).float(), (q / q.sum(-1, keepdim=True)).float())


def run(tables: Tables, gamma: int, trials: int, verify: Verify, *, point_mass: bool = False) -> Tensor:
    """[trials, gamma + 1] tokens: those that the round emitted, completed by draws from p."""
    size = max(80_000 // tables.vocab, 200)  # few enough to stay in the processor's cache
    batches = [range(first, min(first + size, trials)) for first in range(0, trials, size)]
    return torch.cat([_batch(tables, gamma, batch, verify, point_mass) for batch in batches])


def _batch(tables: Tables, gamma: int, trials: range, verify: Verify, point_mass: bool) -> Tensor:
    size, seeds = len(trials), [trial * 0x1234567 for trial in trials]

    def noise(position: int, role: Role) -> Tensor:
        return uniform(seeds, [position] * size, role)

    tokens = torch.zeros(size, gamma + 3, dtype=torch.long)  # two columns of context in front
    q = torch.empty(size, gamma, tables.vocab)
    p = torch.empty(size, gamma + 1, tables.vocab)
    for j in range(gamma + 1):
        p[:, j] = _row(tables.p, j, tokens)
        if j == gamma:
            break
        q[:, j] = _row(tables.q, j, tokens)
        if point_mass:
            q[:, j] = torch.nn.functional.one_hot(q[:, j].argmax(-1), tables.vocab).float()
        tokens[:, j + 2] = draw(q[:, j], noise(j, Role.DRAFT))
    # Requests of one batch draft different lengths; what stands in the padding must not matter.
    lengths = torch.tensor(seeds) % (gamma + 1)
    padding = torch.arange(gamma) >= lengths[:, None]
    drafts = tokens[:, 2 : gamma + 2].masked_fill(padding, 0)
    accept = torch.stack([noise(j, Role.ACCEPT) for j in range(gamma)], 1)
    recover = torch.stack([noise(j, Role.RECOVER) for j in range(gamma + 1)], 1)
    bonus = torch.stack([noise(j, Role.BONUS) for j in range(gamma + 1)], 1)
    p_given = p.clone()
    for j in range(gamma + 1):
        p_given[lengths < j, j] = 0
    q_given = q.masked_fill(padding[:, :, None], 0)
    verdict = verify(p_given, q_given, drafts, lengths, RoundNoise(accept, recover, bonus))
    emitted = tokens
    emitted[:, 2:] = torch.where(torch.arange(gamma + 1) == verdict.accepted[:, None], verdict.final[:, None], 0) + (
        torch.where(torch.arange(gamma + 1) < verdict.accepted[:, None], emitted[:, 2:], 0)
    )
    for j in range(gamma + 1):
        # A later round, so an address of its own; here far enough away to be nobody else's.
        plain = draw(_row(tables.p, j, emitted), noise(j + 1000, Role.BONUS))
        emitted[:, j + 2] = torch.where(j > verdict.accepted, plain, emitted[:, j + 2])
    return emitted[:, 2:]


def _row(table: Tensor, position: int, tokens: Tensor) -> Tensor:  # [trials, vocab]
    before = tokens[:, position : position + 2] % table.shape[1]
    return table[position, before[:, 0], before[:, 1]]


def joint(tables: Tables, positions: int) -> np.ndarray:  # flat [vocab ** positions]
    """The exact joint distribution of the first tokens, by enumeration."""
    vocab = tables.vocab
    found = torch.ones(1, dtype=torch.float64)
    paths = torch.zeros(1, 2, dtype=torch.long)
    for j in range(positions):
        before = paths[:, -2:] % tables.classes
        p = tables.p[j, before[:, 0], before[:, 1]].double()
        found = (found[:, None] * (p / p.sum(-1, keepdim=True))).flatten()
        paths = torch.cat([paths.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(paths))[:, None]], dim=1)
    return found.numpy()


def joint_counts(tokens: Tensor, vocab: int) -> np.ndarray:
    cells = torch.zeros(len(tokens), dtype=torch.long)
    for column in tokens.T:
        cells = cells * vocab + column
    return torch.bincount(cells, minlength=vocab ** tokens.shape[1]).numpy()


def near(vocab: int, positions: int) -> Tables:
    """q leans to even tokens: it accepts and rejects often, so that no path through a round is rare."""
    p = adversarial(vocab, positions).p
    q = p * torch.where(torch.arange(vocab) % 2 == 0, 1.4, 0.6)
    return Tables(p, q / q.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("quality", "point_mass"),
    [(adversarial, False), (adversarial, True), (near, False)],
    ids=["adversarially wrong", "point mass", "nearly right"],
)
@pytest.mark.parametrize("gamma", [2, 3])
def test_the_joint_distribution_is_exact(gamma: int, quality: Callable[..., Tables], point_mass: bool) -> None:
    tables = quality(16, gamma + 1)
    tokens = run(tables, gamma, 200_000, verify_rejection, point_mass=point_mass)
    # The joint of four positions has 65,536 cells; the chi-square looks at three and at the last two.
    assert p_value(joint_counts(tokens[:, :3], 16), joint(tables, 3)) > ALARM
    last = joint(tables, gamma + 1).reshape(-1, 16, 16).sum(0).flatten()
    assert p_value(joint_counts(tokens[:, -2:], 16), last) > ALARM


def test_a_wide_vocabulary_is_exact() -> None:
    vocab, gamma = 4096, 1
    tables = adversarial(vocab, gamma + 1, classes=4, sharp=2.0)
    tokens = run(tables, gamma, 40_000, verify_rejection)
    # By class of the token before, since 4,096 x 4,096 cells would hold nothing.
    for j in range(gamma + 1):
        pairs = _class_pairs(tables, j)
        before = tokens[:, j - 1] % 4 if j else torch.zeros(len(tokens), dtype=torch.long)
        counts = torch.bincount(before * vocab + tokens[:, j], minlength=4 * vocab).numpy()
        assert p_value(counts, pairs) > ALARM, f"position {j}"


def _class_pairs(tables: Tables, position: int) -> np.ndarray:  # flat [classes * vocab]
    """Exact probability of (class of token position - 1, token at position)."""
    classes, vocab = tables.classes, tables.vocab
    states = torch.zeros(classes, classes, dtype=torch.float64)  # of the two tokens before
    states[0, 0] = 1
    for j in range(position + 1):
        p = tables.p[j].double()
        flow = states[:, :, None] * (p / p.sum(-1, keepdim=True))  # [before two, before one, token]
        if j == position:
            return flow.sum(0).flatten().numpy()
        states = flow.sum(0).view(classes, vocab // classes, classes).sum(1)
    raise AssertionError


# --- the same test, of broken verifiers ------------------------------------------------------------------------


def without_correction(p: Tensor, q: Tensor, ids: Tensor, lengths: Tensor, noise: RoundNoise) -> Verdict:
    """On a rejection it draws from p instead of from norm((p - q)+)."""
    verdict = verify_rejection(p, q, ids, lengths, noise)
    batch = torch.arange(len(p))
    final = draw(p[batch, verdict.accepted], noise.bonus[batch, verdict.accepted])
    return Verdict(verdict.accepted, final)


def accepting_by_p(p: Tensor, q: Tensor, ids: Tensor, lengths: Tensor, noise: RoundNoise) -> Verdict:
    """Accepts with chance p instead of min(1, p / q)."""
    ones = torch.zeros_like(q).scatter_(-1, ids.unsqueeze(-1), 1.0)
    verdict = verify_rejection(p, ones, ids, lengths, noise)
    exact = verify_rejection(p, q, ids, torch.minimum(lengths, verdict.accepted), noise)
    batch = torch.arange(len(p))
    residual = (p[batch, verdict.accepted] - torch.nn.functional.pad(q, (0, 0, 0, 1))[batch, verdict.accepted]).clamp(0)
    recovered = draw(residual, noise.recover[batch, verdict.accepted])
    rejected = verdict.accepted < lengths
    return Verdict(verdict.accepted, torch.where(rejected, recovered, exact.final))


def naming_another_q(p: Tensor, q: Tensor, ids: Tensor, lengths: Tensor, noise: RoundNoise) -> Verdict:
    """Accepts by a q that is a fifth flatter than the one that drew the token (law 2)."""
    return verify_rejection(p, 0.8 * q + 0.2 / q.shape[-1], ids, lengths, noise)


def sharing_a_stream(p: Tensor, q: Tensor, ids: Tensor, lengths: Tensor, noise: RoundNoise) -> Verdict:
    """Recovers with the uniform that decided the rejection (law 3)."""
    recover = torch.nn.functional.pad(noise.accept, (0, 1), value=0.5)
    return verify_rejection(p, q, ids, lengths, RoundNoise(noise.accept, recover, noise.bonus))


@pytest.mark.parametrize("broken", [without_correction, accepting_by_p, naming_another_q, sharing_a_stream])
def test_the_test_has_teeth(broken: Verify) -> None:
    tables = near(16, 3)
    tokens = run(tables, 2, 100_000, broken)
    assert p_value(joint_counts(tokens, 16), joint(tables, 3)) < CAUGHT


# --- the other rule, and the edges -----------------------------------------------------------------------------


def test_acceptance_is_the_overlap_of_p_and_q() -> None:
    """Accepted and recovered tokens at the first position, cell by cell: min(p, q), and (p - q)+."""
    tables = adversarial(16, 2)
    p, q = tables.p[0, 0, 0].double(), tables.q[0, 0, 0].double()
    trials = 100_000
    seeds, zeros = list(range(trials)), [0] * trials
    drafts = draw(tables.q[0, 0, 0].expand(trials, -1), uniform(seeds, zeros, Role.DRAFT))
    noise = RoundNoise(
        uniform(seeds, zeros, Role.ACCEPT)[:, None],
        uniform(seeds, zeros, Role.RECOVER)[:, None].expand(-1, 2),
        uniform(seeds, zeros, Role.BONUS)[:, None].expand(-1, 2),
    )
    verdict = verify_rejection(
        tables.p[0, 0, 0].expand(trials, 2, -1),
        tables.q[0, 0, 0].expand(trials, 1, -1),
        drafts[:, None],
        torch.ones(trials, dtype=torch.long),
        noise,
    )
    kept = verdict.accepted == 1
    token = torch.where(kept, drafts, verdict.final)
    counts = torch.bincount(token + 16 * kept.long(), minlength=32).numpy()
    exact = torch.cat([(p - q).clamp(0), torch.minimum(p, q)]).numpy()
    assert p_value(counts, exact / exact.sum()) > ALARM


def test_coupled_picks_are_kept_up_to_the_first_that_differs() -> None:
    picks = torch.tensor([[4, 5, 6, 7]] * 5)
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 0], [4, 0, 0]])
    lengths = torch.tensor([3, 3, 3, 2, 0])
    verdict = verify_coupled(picks, drafts, lengths)
    assert verdict.accepted.tolist() == [3, 1, 0, 2, 0]
    assert verdict.final.tolist() == [7, 5, 4, 6, 4]
