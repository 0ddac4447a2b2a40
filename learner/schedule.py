"""When to try to improve the drafter: a pure function of what has arrived and of how the last attempts ended.

An attempt needs new tokens, and a reason: a drift, a new domain that does badly, no attempt so far, or a last one that
paid. Without a reason, or after two refusals in a row, it takes four times the tokens. It knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REFUSALS = 2  # in a row, after which the drafter is as good as this traffic makes it
PATIENCE = 4  # times the tokens of a usual attempt, when there is no reason for one

Outcome = Literal["none", "promoted", "refused", "undecided"]


@dataclass(frozen=True)
class Situation:
    fresh_tokens: int  # to learn from, arrived since the last attempt looked
    drifted: tuple[str, ...]  # domains whose alpha has fallen
    lagging: tuple[str, ...]  # new domains below the long-run average
    last: Outcome  # none: no attempt so far
    refusals: int  # in a row


@dataclass(frozen=True)
class Plan:
    attempt: bool
    reason: str  # why there is an attempt, or what it waits for
    focus: tuple[str, ...] = ()  # domains to learn from first; empty: whatever has arrived


def plan_attempt(situation: Situation, least_tokens: int) -> Plan:
    """`least_tokens` is learner.min_fresh_tokens."""
    fresh = situation.fresh_tokens
    focus = situation.drifted or situation.lagging
    reason = _reason(situation)
    given_up = situation.refusals >= REFUSALS and not situation.drifted
    needed = least_tokens if reason and not given_up else PATIENCE * least_tokens
    if fresh >= needed:
        return Plan(True, reason or f"{fresh} new tokens", focus)
    return Plan(False, f"{fresh} of {needed} new tokens", focus)


def given_up(situation: Situation) -> bool:
    """Whether what is now should be taken for normal: tried twice in vain."""
    return situation.refusals >= REFUSALS


def _reason(situation: Situation) -> str:
    if situation.drifted:
        return f"alpha has fallen in {', '.join(situation.drifted)}"
    if situation.lagging:
        return f"{', '.join(situation.lagging)} is new and below the average"
    if situation.last == "none":
        return "the first attempt"
    if situation.last == "promoted":
        return "the last attempt was promoted"
    return ""
