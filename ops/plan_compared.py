"""`redraft plan --validate`: the comparison of `ops.plan_validate` as a table, and whether it is within the tolerance.

The tolerance is 20 % of the measured value, for a round's time and for tokens a second, plain decoding at batch 1, 4
and 8 and, where a drafter ships for the target, speculation beside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from ops.plan_answer import Question
from ops.plan_rounds import Drafting
from ops.plan_text import table
from ops.plan_validate import Compared, compare
from shared.artifact import MANIFEST_FILE
from shared.config import load_config
from shared.drafters import resolve_base
from shared.models.target import load_model

BATCHES, GAMMAS = (1, 4, 8), (0, 3)
TOLERANCE = 0.2


@dataclass(frozen=True)
class Comparison:
    origin: str  # of the machine's figures
    rows: tuple[Compared, ...]

    @property
    def within(self) -> bool:
        return all(abs(ratio - 1) <= TOLERANCE for row in self.rows for ratio in (row.step_ratio, row.tokens_ratio))

    def text(self) -> str:
        rows = [
            [
                f"{row.batch}", f"{row.gamma}", f"{row.context:.0f}",
                f"{row.accepted} of {row.tested}" if row.gamma else "",
                f"{row.predicted_seconds * 1e3:.1f}", f"{row.measured_seconds * 1e3:.1f}", f"{row.step_ratio:.2f}",
                f"{row.predicted_tokens:.1f}", f"{row.measured_tokens:.1f}", f"{row.tokens_ratio:.2f}",
            ]
            for row in self.rows
        ]  # fmt: skip
        head = [
            "batch",
            "gamma",
            "context",
            "accepted",
            "round ms",
            "measured",
            "ratio",
            "tokens/s",
            "measured",
            "ratio",
        ]
        said = "every ratio is within 20 %" if self.within else "**not every ratio is within 20 %**"
        return "\n".join(["# Predicted and measured", "", self.origin, "", table(head, rows), "", said, ""])

    def plain(self) -> dict[str, Any]:
        return {"device": self.origin, "within": self.within, "rows": [asdict(row) for row in self.rows]}


def validate(question: Question, spec: str) -> Comparison:
    """Loads the target that `spec` names, in the question's weight format. Raises ConfigError."""
    config = load_config(overrides={"target.model": spec, "target.device": "cpu", "target.dtype": question.weights})
    loaded = load_model(spec, home=config.home_path, device="cpu", weights=question.weights, field="--target")
    base = resolve_base(config, loaded.name, loaded.fingerprint)
    if base.folder is None:
        drafting = Drafting("none", 0.0)
    else:
        manifest = json.loads((base.folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        fitting = replace(question, draft_vocab=manifest["config"]["draft_vocab"], kinds=("eagle3",))
        (drafting,) = fitting.draftings(question.device)
    target = question.model(question.device)
    return Comparison(question.device.origin, tuple(compare(config, loaded, target, drafting, BATCHES, GAMMAS)))
