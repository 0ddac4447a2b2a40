"""What one arm came to over the stream, and how it is kept on disk: a finished arm is never computed twice.

The file's name holds a hash of all that the result depends on, so a changed setting is another file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learner.evaluator import Judged
from ops.experiment_arms import Arm


@dataclass(frozen=True)
class Version:
    """A drafter that served from `record` of the stream on."""

    name: str
    record: int
    domains: tuple[str, ...] = ()  # while it served


@dataclass(frozen=True)
class AttemptFacts:
    number: int
    begun: int  # records of the stream that had arrived
    ended: int
    why: str
    reason: str  # of its outcome
    promoted: bool
    tokens: int  # learnt from, repeats counted


@dataclass(frozen=True)
class ArmResult:
    arm: str
    judged: tuple[Judged, ...]  # one for each record of the stream, judged before anything was learnt from it
    seconds: Mapping[str, float]  # by part
    tokens_learnt: int = 0  # repeats counted
    versions: tuple[Version, ...] = ()  # of an online arm, the base first
    attempts: tuple[AttemptFacts, ...] = ()
    # Domain -> version -> (acceptances, positions) of each record that was kept apart.
    looked_back: Mapping[str, Mapping[str, Sequence[tuple[float, int]]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> ArmResult:
        return cls(
            **{
                **tree,
                "judged": tuple(Judged(**row) for row in tree["judged"]),
                "versions": tuple(Version(**{**row, "domains": tuple(row["domains"])}) for row in tree["versions"]),
                "attempts": tuple(AttemptFacts(**row) for row in tree["attempts"]),
            }
        )


class ArmShelf:
    """`<data>/arms`, one file an arm and what it depends on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def path(self, arm: Arm, key: str) -> Path:
        return self._folder / f"{arm.name}-{key}.json"

    def get(self, arm: Arm, key: str) -> ArmResult | None:
        """None for an arm that is not there, or is of an earlier release."""
        try:
            return ArmResult.from_dict(json.loads(self.path(arm, key).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def put(self, arm: Arm, key: str, result: ArmResult) -> None:
        path = self.path(arm, key)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result.to_dict()), encoding="utf-8")
        partial.replace(path)
