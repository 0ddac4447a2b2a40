"""The drafters that are compared over the same traffic, each an arm: static, distilled offline, and learning online."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigError


@dataclass(frozen=True)
class Arm:
    name: str
    kind: Literal["static", "offline", "online"]
    meaning: str
    share: float = 0.0  # of the data that an offline drafter learns from
    full: bool = False  # all weights are trained, not an adapter
    gate: bool = True  # a candidate must be proven better before it serves
    replay: bool = True  # an attempt learns from earlier domains too


STATIC, ONLINE, OFFLINE_ALL = "static", "online", "offline-100"
_OFFLINE = tuple(
    Arm(f"offline-{percent}", "offline", f"distilled offline on {percent} % of the data", share=percent / 100)
    for percent in (30, 50, 70, 100)
)
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(STATIC, "static", "the base drafter as it is"),
        *_OFFLINE,
        Arm(ONLINE, "online", "the learner with its defaults: LoRA, gate, replay"),
        Arm("online-full", "online", "all weights are trained, not a LoRA", full=True),
        Arm("online-no-gate", "online", "every candidate serves, proven or not", gate=False),
        Arm("online-no-replay", "online", "an attempt learns from the newest domain only", replay=False),
    )
}
GROUPS = {"offline": tuple(arm.name for arm in _OFFLINE)}


def chosen_arms(text: str) -> tuple[Arm, ...]:
    """From names with commas, in the order of ARMS. The static arm is always there: the others are held against it."""
    wanted = {STATIC}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in ARMS and word not in GROUPS:
            raise ConfigError("--arms", f"{word!r} is not known", f"Choose from {', '.join([*ARMS, *GROUPS])}.")
        wanted.update(GROUPS.get(word, (word,)))
    return tuple(arm for arm in ARMS.values() if arm.name in wanted)
