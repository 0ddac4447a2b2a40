"""The atlas: where drafts are accepted and where they fall, counted from traces.

Every tested position of every speculation round is counted once in each table, so each table sums to the same accepted
and tested, which are the replicas' own counters of the same requests. Counts only; ratios are for whoever shows them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ops.report_words import Class
from shared.trace import Sampling, TraceRecord

Read = Callable[[Sequence[int]], str]  # token ids to text
_BEFORE, _CONTEXTS = 16, 3  # tokens of context; examples kept of a rejection


@dataclass
class Tally:
    accepted: int = 0
    tested: int = 0

    def add(self, accepted: bool) -> None:
        self.accepted += accepted
        self.tested += 1


@dataclass
class Rejection:
    """A draft that fell, and what the target said in its place."""

    draft: int
    count: int = 0
    instead: Counter[int] = field(default_factory=Counter)
    contexts: list[str] = field(default_factory=list)


@dataclass
class Atlas:
    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    total: Tally = field(default_factory=Tally)
    by_position: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))  # in the draft, from 1
    by_class: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))  # of what the target said
    by_domain: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_temperature: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_version: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    class_by_domain: defaultdict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    rejections: dict[int, Rejection] = field(default_factory=dict)  # by the draft's id
    drafts: Counter[int] = field(default_factory=Counter)  # tested drafts by id, kept or not

    def add(self, record: TraceRecord, read: Read, class_of: Callable[[int], Class]) -> None:
        self.requests += 1
        self.tokens += len(record.output_ids)
        temperature = temperature_of(record.sampling)
        for round_ in record.rounds:
            if not round_.drafted:
                continue
            self.rounds += 1
            self.drafted += len(round_.drafted)
            for depth in range(round_.tested):
                kept, place = depth < round_.accepted, round_.start + depth
                said = int(record.output_ids[place])
                kind = class_of(said)
                tables = (
                    self.by_position[depth + 1],
                    self.by_class[kind],
                    self.by_domain[record.domain],
                    self.by_temperature[temperature],
                    self.by_version[round_.version],
                    self.class_by_domain[record.domain, kind],
                )
                for tally in (self.total, *tables):
                    tally.add(kept)
                self.drafts[round_.drafted[depth]] += 1
                if not kept:
                    self._reject(record, place, round_.drafted[depth], said, read)

    def _reject(self, record: TraceRecord, place: int, draft: int, said: int, read: Read) -> None:
        found = self.rejections.setdefault(draft, Rejection(draft))
        found.count += 1
        found.instead[said] += 1
        if len(found.contexts) < _CONTEXTS:
            before = [*record.prompt_ids.tolist(), *record.output_ids[:place].tolist()][-_BEFORE:]
            found.contexts.append(read(before))

    def most_rejected(self, count: int) -> list[Rejection]:
        return sorted(self.rejections.values(), key=lambda found: (-found.count, found.draft))[:count]


def temperature_of(sampling: Sampling) -> str:
    """A band. Seeded requests accept by coupling, a little less often, and are told apart."""
    if sampling.greedy:
        return "0 (greedy)"
    band = next((f"up to {most:g}" for most in (0.3, 0.7, 1.0) if sampling.temperature <= most), "above 1")
    return f"{band}, seeded" if sampling.seeded else band
