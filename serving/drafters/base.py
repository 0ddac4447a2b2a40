"""What the engine asks of any drafter, and nothing more.

A drafter owns `Sequence.draft` and its own KV pools, which share the target's block tables. It proposes before the
target's forward and is told afterwards what was kept. Whatever it proposes, output stays the target's; the only ways
to be wrong are to misname the distribution that drew a token, or to look at a token that is not committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serving.engine.sequence import Sequence
from serving.spec.draft import Draft


@dataclass(frozen=True)
class DraftJob:
    """One decoding sequence that shall get up to `gamma` >= 1 drafts."""

    sequence: Sequence
    gamma: int
    least: float = 0.0  # chance that all drafts so far hold under which no further one is drawn; 0: do not ask


class Drafter(Protocol):
    """One kind of drafter."""

    kind: str
    version: str
    feature_layers: tuple[int, ...]  # target layers whose outputs it needs; empty: none
    max_positions: int  # it cannot draft beyond this position

    def propose(self, jobs: Seq[DraftJob]) -> list[Draft]:
        """A draft for each job, in order; fewer tokens than asked are allowed."""
        ...

    def commit(self, sequence: Sequence, kept: int, features: Tensor | None) -> None:
        """After a target forward: `kept` of this round's drafts are committed; `features` [rows, layers * hidden]
        belong to the positions that the target read for good."""
        ...


def concat(parts: Seq[Tensor]) -> Tensor:
    """One tensor of many along the rows, without a copy when there is but one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
