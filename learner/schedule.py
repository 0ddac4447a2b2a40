"""When to try to improve the drafter: a pure function of what has arrived and of how the last attempts ended.

An attempt needs new tokens of the domains it is for, and a reason: a drift, a new domain that does badly, or a last
attempt that paid. A refusal may only mean that there was too little to learn from, so the next attempt on the same
domains waits for twice the tokens; after three in a row the drafter is taken for as good as this traffic makes it.
Without a reason an attempt takes eight times the tokens, and twice as many again after each further refusal: where
nothing is gained, learning comes to rest. It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

REFUSALS = 3  # in a row, after which the drafter is as good as this traffic makes it
PATIENCE = 8  # times the tokens of a usual attempt, when there is no reason for one
KILLS = 3  # of one attempt, after which it is given up: it may be what kills the learner
REST = 64  # times PATIENCE: the longest pause

Outcome = Literal["none", "promoted", "refused", "undecided", "barred"]  # barred: it passed the gate and may not serve


@dataclass(frozen=True)
class Progress:
    """Where the attempts stand; survives restarts."""

    attempts: int = 0  # begun
    promotions: int = 0
    trained_to: int = 0  # order of the last arrival that a finished attempt could have learnt from
    last: Outcome = "none"
    refusals: int = 0  # in a row, of attempts on the domains in `tried`
    tried: tuple[str, ...] = ()
    decision: str = ""  # the last one, in words
    running: bool = False  # an attempt has begun and not ended: after a restart it is made again
    focus: tuple[str, ...] = ()  # of that attempt
    kills: int = 0  # restarts in the middle of it

    def begun(self, focus: tuple[str, ...] = ()) -> Progress:
        """A domain that was not tried before begins with a clean slate; one that was interrupted stays the same."""
        if self.running:
            return self
        known = set(focus) <= set(self.tried)
        return replace(
            self,
            attempts=self.attempts + 1,
            refusals=self.refusals if known else 0,
            tried=self.tried if known else focus,
            running=True,
            focus=focus,
            kills=0,
        )

    @classmethod
    def kept(cls, state: Mapping[str, Any]) -> Progress:
        """From what was kept on disk, where a tuple is a list."""
        return cls(**{**state, **{name: tuple(state.get(name, ())) for name in ("tried", "focus")}})

    def ended(self, outcome: Outcome, trained_to: int, decision: str) -> Progress:
        """An attempt that could not be decided says nothing about the next one."""
        refusals = {"promoted": 0, "refused": self.refusals + 1}.get(outcome, self.refusals)
        return replace(
            self,
            promotions=self.promotions + (outcome == "promoted"),
            trained_to=trained_to,
            last=outcome,
            refusals=refusals,
            decision=decision,
            running=False,
        )

    def resumed(self) -> Progress:
        """After a restart. A broken attempt is made again with what it had, but not for ever."""
        if not self.running:
            return self
        if self.kills + 1 < KILLS:
            return replace(self, kills=self.kills + 1)
        return self.ended("refused", self.trained_to, f"kept: the learner was killed {KILLS} times during the attempt")


@dataclass(frozen=True)
class Situation:
    fresh: Mapping[str, int]  # tokens to learn from by domain, arrived since the last attempt looked
    drifted: tuple[str, ...]  # domains with new traffic whose alpha has fallen
    lagging: tuple[str, ...]  # new domains, with new traffic, below the long-run average
    last: Outcome  # none: no attempt so far
    refusals: int  # in a row
    tried: tuple[str, ...] = ()  # domains that those refusals speak of


@dataclass(frozen=True)
class Plan:
    attempt: bool
    reason: str  # why there is an attempt, or what it waits for
    focus: tuple[str, ...] = ()  # domains to learn from first; empty: whatever has arrived


def plan_attempt(situation: Situation, least_tokens: int) -> Plan:
    """`least_tokens` is learner.min_fresh_tokens."""
    focus = tuple(dict.fromkeys(situation.drifted + situation.lagging))
    reason = _reason(situation)
    refusals = situation.refusals if set(focus) <= set(situation.tried) else 0
    given_up = refusals >= REFUSALS and not situation.drifted
    rest = min(2 ** max(refusals - REFUSALS, 0), REST)
    needed = least_tokens * (PATIENCE * rest if given_up or not reason else min(2**refusals, PATIENCE))
    fresh = sum(situation.fresh.get(domain, 0) for domain in focus or situation.fresh)
    if fresh >= needed:
        return Plan(True, reason or f"{fresh} new tokens", focus)
    return Plan(False, f"{fresh} of {needed} new tokens", focus)


def tried_in_vain(progress: Progress) -> bool:
    """Whether what is now should be taken for normal, so that only the next drift counts as one."""
    return progress.refusals >= REFUSALS


def _reason(situation: Situation) -> str:
    if situation.drifted:
        return f"alpha has fallen in {', '.join(situation.drifted)}"
    if situation.lagging:
        return f"{', '.join(situation.lagging)} is new and below the average"
    if situation.last == "promoted":
        return "the last attempt was promoted"
    return ""
