"""What one timed call of one contender found, as it crosses the pipe from its worker.

Counts and seconds only; ratios are formed where they are shown. A contender that cannot know a count leaves it at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

Messages = Sequence[Mapping[str, str]]  # one conversation, as the chat endpoint takes it


@dataclass(frozen=True)
class Decode:
    """The steps in which no prompt was read, of our own engine. Times are seconds over all of them."""

    forwards: int = 0  # target forwards, each of the whole batch
    steps: int = 0  # the same, counted for each request in them
    tokens: int = 0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)  # draft, verify, sample, schedule
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    @property
    def model_s(self) -> float:
        """Of forwards, the drafter's and the target's."""
        return self.phases.get("draft", 0.0) + self.phases.get("verify", 0.0)


@dataclass(frozen=True)
class Times:
    """When answers came, seconds."""

    ttft_s: Sequence[float]  # of each request: until its first token
    itl_s: Sequence[float]  # of each request of two deliveries or more: mean seconds a token, after the first
    gaps_s: Sequence[float]  # between deliveries, of all requests (a delivery may hold several tokens)
    latency_s: Sequence[float]  # of each request: until its answer is whole


@dataclass(frozen=True)
class Measure:
    """One call: some prompts together, from handing them over until the last answer is whole."""

    seconds: float
    tokens: int  # generated
    times: Times
    forwards: int = 0  # of the target, where known
    steps: int = 0  # the same, counted for each request in them
    decode: Decode = field(default_factory=Decode)
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of the whole call
    drafted_lengths: Mapping[str, int] = field(default_factory=dict)  # tokens drafted -> steps of a request, 0 included
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Measure:
        return cls(**{**tree, "times": Times(**tree["times"]), "decode": Decode(**tree["decode"])})


class Clock:
    """The moments at which one request's tokens came, seconds since the call began."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start  # when the request arrived
        self.at: list[float] = []
        self.tokens = 0

    def deliver(self, at: float, tokens: int = 1) -> None:
        if tokens:
            self.at.append(at)
            self.tokens += tokens

    @property
    def started(self) -> bool:
        return bool(self.at)


def times_of(clocks: Sequence[Clock]) -> Times:
    """Requests that got no token are in none of them."""
    seen = [clock for clock in clocks if clock.started]
    return Times(
        ttft_s=[clock.at[0] - clock.start for clock in seen],
        itl_s=[(clock.at[-1] - clock.at[0]) / max(clock.tokens - 1, 1) for clock in seen if len(clock.at) > 1],
        gaps_s=[after - before for clock in seen for before, after in pairwise(clock.at)],
        latency_s=[clock.at[-1] - clock.start for clock in seen],
    )
