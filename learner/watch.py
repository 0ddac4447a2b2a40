"""A new version while it is watched: what it is compared with, how far the watch has come, and what it says.

Beside a canary the other replicas serve what was there before; with one replica, the recent past is what it is compared
with. Progress is counted in tested tokens of the new version, looked at a few times on the way, so that a bad version
goes early. It points nowhere and stores nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from learner.comparison import LiveDifference, compare_alpha, compare_rounds
from learner.fleet import Fleet, Sums
from shared.config import RolloutConfig
from shared.counters import Counters
from shared.live_alpha import Served
from shared.store import Champion

LOOKS = 4  # of one watch; together they keep to rollout.confidence
PLAIN = 8  # tokens served that stand for one tested: a version that nothing is drafted with must end too
TAKE_S = 120.0  # for the canary to serve it at all


@dataclass(frozen=True)
class Watching:
    pointer: Champion  # of the new version
    against: str  # version that it is compared with, and that a rollback returns to
    canary: str  # replica; empty: all serve it
    since: float  # seconds since the epoch
    start: Sums = field(default_factory=dict)  # what had been counted then
    before: Mapping[str, Served] = field(default_factory=dict)  # by domain, of `against`; without a canary
    looks: int = 0

    def to_keep(self) -> dict[str, Any]:
        """JSON."""
        return {**asdict(self), "start": {replica: counts.fields for replica, counts in self.start.items()}}

    @classmethod
    def kept(cls, plain: Mapping[str, Any]) -> Watching:
        return cls(
            **{
                **plain,
                "pointer": Champion(**plain["pointer"]),
                "start": {replica: Counters(fields) for replica, fields in plain["start"].items()},
                "before": {domain: Served(**sums) for domain, sums in plain["before"].items()},
            }
        )


@dataclass(frozen=True)
class Verdict:
    outcome: Literal["goes on", "held", "fell"]
    reason: str  # a sentence with the numbers
    looks: int
    numbers: Mapping[str, float] = field(default_factory=dict)


def progress(watching: Watching, fleet: Fleet) -> tuple[float, float]:
    """Tested tokens of the new version so far, and tokens that requests of its got."""
    new = _new(watching, fleet).values()
    return sum(s.tested for s in new), sum(s.steps + s.accepted for s in new)


def judge(watching: Watching, fleet: Fleet, config: RolloutConfig, now: float) -> Verdict:
    """`now` in seconds since the epoch."""
    version, canary = watching.pointer.version, watching.canary
    tested, tokens = progress(watching, fleet)
    if canary and not tokens and now - watching.since > TAKE_S and fleet.versions.get(canary) != version:
        return Verdict("fell", f"{version} fell: its canary has not served it within {TAKE_S:.0f} s", watching.looks)
    share = max(tested, tokens / PLAIN) / config.watch_tokens
    looks = min(int(share * LOOKS), LOOKS)
    if looks <= watching.looks:
        return Verdict("goes on", "", watching.looks)
    confidence = 1 - (1 - config.confidence) / (2 * LOOKS)  # alpha and rounds, at each look
    alpha = compare_alpha(_new(watching, fleet), _old(watching, fleet), confidence)
    rounds = compare_rounds(
        fleet.times(version, lambda replica: not canary or replica == canary),
        fleet.times(watching.against, lambda replica: replica != canary),
        confidence,
    )
    numbers: dict[str, float] = {"tested": tested, "tokens": tokens}
    if alpha is not None:
        numbers |= {
            "alpha_before": alpha.alpha_old,
            "alpha_after": alpha.alpha_new,
            "gain": alpha.alpha.value,
            "gain_low": alpha.alpha.low,
            "gain_high": alpha.alpha.high,
            "per_step_before": alpha.per_step_old,
            "per_step_after": alpha.per_step_new,
            "requests": alpha.requests,
        }
    if rounds is not None:
        numbers |= {"slowdown": rounds.value, "slowdown_low": rounds.low, "slowdown_high": rounds.high}
    beside = f"{'beside' if canary else 'after'} {watching.against}"
    if alpha is not None and _has_fallen(alpha, config.fall):
        return Verdict("fell", f"{version} fell: {_say_alpha(alpha)} {beside}", looks, numbers)
    if rounds is not None and rounds.low > config.slowdown:
        said = f"{version} fell: its rounds take {rounds.value:+.1%} (at least {rounds.low:+.1%}) {beside}"
        return Verdict("fell", said, looks, numbers)
    if looks < LOOKS:
        return Verdict("goes on", "", looks, numbers)
    said = _say_alpha(alpha) if alpha is not None else "nothing to compare it with"
    return Verdict("held", f"{version} held: {said} {beside}, {tested:.0f} tested", looks, numbers)


def _new(watching: Watching, fleet: Fleet) -> dict[str, Served]:
    canary = watching.canary
    return fleet.since(watching.start, watching.pointer.version, lambda replica: not canary or replica == canary)


def _old(watching: Watching, fleet: Fleet) -> Mapping[str, Served]:
    if not watching.canary:
        return watching.before
    return fleet.since(watching.start, watching.against, lambda replica: replica != watching.canary)


def _has_fallen(live: LiveDifference, borne: float) -> bool:
    """Under gamma auto a better drafter is also used where drafts are harder, and its alpha may fall for that alone: so
    the steps, plain ones included, must have lost tokens too."""
    return live.alpha.high < -borne and live.per_step_new < live.per_step_old


def _say_alpha(live: LiveDifference) -> str:
    return (
        f"live alpha {live.alpha_old:.3f} -> {live.alpha_new:.3f} ({live.alpha.low:+.3f} … {live.alpha.high:+.3f}, "
        f"{live.requests} requests)"
    )
