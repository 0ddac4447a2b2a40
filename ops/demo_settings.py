"""The demo's settings: a person's own, and the few that a run of minutes needs to begin from nothing.

Each demo starts with the base drafter, so what an earlier run left in the home folder must not be found again.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from ops import settings
from ops.settings import Settings

# A lower bound on a gain of α is never above this, so the gate keeps the base drafter whatever is learnt.
_NEVER = 1.0


def demo_settings(arguments: Namespace) -> Settings:
    """Raises ConfigError naming the wrong key, variable or flag."""
    control = arguments.no_learn
    # For the demo the learner runs in the control too: it measures, and costs the cores what it costs otherwise.
    chosen = settings.read_settings(Namespace(**{**vars(arguments), "no_learn": False}))
    if control:
        gate = replace(chosen.config.gate, min_gain=_NEVER)
        chosen = Settings(replace(chosen.config, gate=gate), {**chosen.sources, "gate.min_gain": "--no-learn"})
    return chosen
