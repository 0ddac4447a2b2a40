"""What the demo sends and when: phases of prompts, each with a share of the time.

Each prompt is used once. A phase ends when its time is over or its prompts are, so a slow machine finishes in time
and a fast one repeats nothing. It knows neither HTTP nor the clock: callers say how many seconds have passed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from ops.prompt_sets import load_prompts
from ops.traffic_file import TrafficRow

WARM_UP = ("chat", "code", "maths")
DRIFTS = ("sql", "german")
_SHARES = (0.14, 0.43, 0.43)  # of the time: all warm-up domains together, then each drift
_PROMPTS = 1500  # a domain; fewer than there are, so that no template comes too often
_FILE_WARM_UP = 0.1  # of a file's rows; domains that come first after them are drifts

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    domain: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Phase:
    name: str
    share: float  # of the time for traffic
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Plan:
    """`drifted` are the domains that the traffic moves to, in order."""

    phases: tuple[Phase, ...]
    drifted: tuple[str, ...]


def built_in_plan(seed: int) -> Plan:
    """Warm-up domains in turn, then one drift after the other."""
    warm_up = [_prompts(domain, seed) for domain in WARM_UP]
    mixed = tuple(prompt for prompt in chain.from_iterable(zip_longest(*warm_up)) if prompt is not None)
    phases = [Phase("warm-up", _SHARES[0], mixed)]
    for domain, share in zip(DRIFTS, _SHARES[1:], strict=True):
        phases.append(Phase(domain, share, tuple(_prompts(domain, seed))))
    return Plan(tuple(phases), DRIFTS)


def plan_of_rows(rows: Sequence[TrafficRow]) -> Plan:
    """The rows of a traffic file in their order, as one phase."""
    prompts = tuple(Prompt(_tag(row.domain), tuple(row.messages)) for row in rows)
    settled = {prompt.domain for prompt in prompts[: max(1, int(len(prompts) * _FILE_WARM_UP))]}
    later = dict.fromkeys(prompt.domain for prompt in prompts)
    return Plan((Phase("file", 1.0, prompts),), tuple(domain for domain in later if domain not in settled))


class Feed:
    """Hands a plan's prompts out, each once."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self._plan, self._seconds = plan, seconds
        self._index = 0
        self._started = 0.0  # seconds at which the present phase began
        self._prompts = iter(plan.phases[0].prompts)

    @property
    def phase(self) -> Phase | None:
        """None when everything is over."""
        return self._plan.phases[self._index] if self._index < len(self._plan.phases) else None

    def next(self, elapsed: float) -> Prompt | None:
        """The next prompt `elapsed` seconds after the start, or None when there is none any more."""
        while (phase := self.phase) is not None:
            if elapsed - self._started < phase.share * self._seconds and (prompt := next(self._prompts, None)):
                return prompt
            # A phase that was cut by its time ends at its time, however late we are asked.
            self._started = min(elapsed, self._started + phase.share * self._seconds)
            self._index += 1
            self._prompts = iter(self.phase.prompts if self.phase else ())
        return None


def _prompts(domain: str, seed: int) -> list[Prompt]:
    texts = load_prompts(domain, "demo", count=_PROMPTS, seed=seed)
    return [Prompt(domain, ({"role": "user", "content": text},)) for text in texts]


def _tag(domain: str) -> str:
    """As the API takes it in `metadata.domain`."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", domain)[:64]
