"""Gamma controllers of a made-up machine, what is taught to them, and the tokens that its formula gives."""

from __future__ import annotations

import random
from collections.abc import Sequence

from serving.spec.gamma import Asking, GammaController, Recent
from shared.acceptance import expected_tokens

TARGET_S, ROW_S, DRAFT_S = 0.040, 0.001, 0.004  # of a forward, of each row in it, of one drafted token


def controller(
    *, exploration: float = 0.0, fixed: int | None = None, most: int = 4, draft_s: float = DRAFT_S
) -> GammaController:
    """With the costs of one machine measured: one draft step costs the same at every depth and batch."""
    made = GammaController(fixed=fixed, most=most, exploration=exploration)
    for rows in range(1, 200):
        made.costs.by_rows.set(rows, TARGET_S + ROW_S * rows)
    for batch in range(1, 33):
        made.costs.draft_first.set(batch, draft_s)
        made.costs.draft_next.set(batch, draft_s)
    return made


def choose(made: GammaController, domains: Sequence[str], limits: Sequence[int], *, plain: int = 0) -> list[int]:
    """For new requests, each of which stands for its domain."""
    asking = [Asking(domain, limit, Recent()) for domain, limit in zip(domains, limits, strict=True)]
    return made.choose(asking, plain=plain)


def teach(made: GammaController, alpha: float, *, domain: str = "d", rounds: int = 600) -> None:
    """So many rounds that the prior is forgotten and the estimate is alpha itself."""
    for _ in range(rounds):
        made.observe(domain, alpha, 1)  # type: ignore[arg-type]


def rate(alphas: list[float], gammas: tuple[int, ...], draft_s: float = DRAFT_S) -> float:
    """Tokens a second of a batch, from the formula."""
    tokens = sum(expected_tokens(alpha, gamma) for alpha, gamma in zip(alphas, gammas, strict=True))
    rows = len(gammas) + sum(gammas)
    return tokens / (TARGET_S + ROW_S * rows + max(gammas) * draft_s)


def accepted_of(rng: random.Random, alpha: float, gamma: int) -> int:
    """Drafts kept of `gamma`, each with chance alpha given those before it."""
    kept = 0
    while kept < gamma and rng.random() < alpha:
        kept += 1
    return kept
