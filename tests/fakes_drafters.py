"""Drafters that no one would deploy, each wrong in its own way; the laws must hold with all of them.

The model-driven ones are a `ModelDrafter` whose logits or drafts are bent before anybody sees them, so that they keep
real caches. `PlaybackDrafter` has no model: it repeats a known answer, with mistakes where the test wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from serving.drafters.base import DraftJob
from serving.drafters.model import ModelDrafter
from serving.engine.sequence import Sequence as Running
from serving.spec.draft import Draft


class ContraryDrafter(ModelDrafter):
    """Likes best what its model likes least: over the target's own weights, q is as wrong as it can be."""

    kind = "contrary"

    def _fit(self, logits: Tensor) -> Tensor:
        fitted = super()._fit(logits)
        return torch.where(fitted == float("-inf"), fitted, -fitted)


class PointMassDrafter(ModelDrafter):
    """Always proposes its model's favourite, also to sampled requests, and says that this is a point mass."""

    kind = "point_mass"

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [replace(draft, probs=None) for draft in super().propose(jobs)]

    def _fit(self, logits: Tensor) -> Tensor:
        fitted = super()._fit(logits)
        return torch.full_like(fitted, float("-inf")).scatter_(1, fitted.argmax(1, keepdim=True), 0.0)


class ShortDrafter(ModelDrafter):
    """Returns fewer tokens than it was asked for, sometimes none; how many depends on the position alone (law 2)."""

    kind = "short"

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [self._cut(job, draft) for job, draft in zip(jobs, super().propose(jobs), strict=True)]

    def _cut(self, job: DraftJob, draft: Draft) -> Draft:
        length = min(draft.gamma, job.sequence.committed % 3)
        probs = draft.probs[:length] if draft.probs is not None and length else None
        return Draft(draft.token_ids[:length], draft.parents[:length], probs, draft.version)


class PlaybackDrafter:
    """Proposes what a request is known to answer, but for the positions where `wrong` says to miss."""

    kind = "playback"
    feature_layers: tuple[int, ...] = ()
    max_positions = 1 << 30

    def __init__(
        self, answers: Mapping[str, Sequence[int]], version: str = "v0", wrong: Callable[[int], bool] = lambda _: False
    ) -> None:
        self.answers, self.version, self._wrong = answers, version, wrong

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [Draft.chain(self._tokens(job), None, self.version) for job in jobs]

    def commit(self, sequence: Running, kept: int, features: Tensor | None) -> None:
        pass

    def _tokens(self, job: DraftJob) -> list[int]:
        start, answer = job.sequence.committed, self.answers.get(job.sequence.id, ())
        known = enumerate(answer[start : start + job.gamma], start)
        return [token if not self._wrong(position) else (token + 1) % 16 for position, token in known]


class BrokenDrafter(PlaybackDrafter):
    """Raises in its `fail_at`-th round."""

    kind = "broken"

    def __init__(self, fail_at: int) -> None:
        super().__init__({})
        self._left = fail_at

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("this drafter breaks on purpose")
        return super().propose(jobs)


class LyingDrafter(ModelDrafter):
    """Breaks law 2: the q that it names is flatter than the one that drew its tokens. The laws' tests must see it."""

    kind = "lying"

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [replace(draft, probs=self._flatter(draft.probs)) for draft in super().propose(jobs)]

    @staticmethod
    def _flatter(probs: Tensor | None) -> Tensor | None:
        return None if probs is None else probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)


class PickyDrafter(ModelDrafter):
    """Breaks law 2: drops a draft because of the token that was drawn. The laws' tests must see it."""

    kind = "picky"

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [self._cut(draft) for draft in super().propose(jobs)]

    @staticmethod
    def _cut(draft: Draft) -> Draft:
        length = next((i for i, token in enumerate(draft.token_ids) if token % 2), draft.gamma)
        probs = draft.probs[:length] if draft.probs is not None and length else None
        return Draft(draft.token_ids[:length], draft.parents[:length], probs, draft.version)
