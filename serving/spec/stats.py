"""Counters of one request's speculation, kept while it runs."""

from __future__ import annotations

from serving.engine.events import RequestStats
from serving.spec.gamma import Recent


class StatsKeeper:
    """Adds up rounds; `view` freezes them for the response."""

    def __init__(self) -> None:
        self.steps = self.spec_steps = self.drafted = self.accepted = self.tested = 0
        self.by_draft_length: dict[int, list[int]] = {}
        self.version = ""
        # Steps, accepted, tested; plain steps under the version that stood by.
        self.by_version: dict[str, list[int]] = {}
        self.recent = Recent()

    def add(self, *, drafted: int, accepted: int, tested: int, version: str) -> None:
        self.steps += 1
        mine = self.by_version.setdefault(version, [0, 0, 0])
        for place, count in enumerate((1, accepted, tested)):
            mine[place] += count
        if not drafted:
            return
        self.spec_steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tested += tested
        self.version = version
        self.by_draft_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1

    def view(self, gamma_max: int) -> RequestStats:
        lengths = [0] * (max(self.by_draft_length, default=0) + 1)
        for histogram in self.by_draft_length.values():
            for accepted, count in enumerate(histogram):
                lengths[accepted] += count
        return RequestStats(
            num_steps=self.steps,
            num_spec_steps=self.spec_steps,
            num_draft_tokens=self.drafted,
            num_accepted_draft_tokens=self.accepted,
            tested=self.tested,
            accepted_lengths=tuple(lengths) if self.spec_steps else (),
            by_draft_length={length: tuple(histogram) for length, histogram in sorted(self.by_draft_length.items())},
            num_spec_tokens=gamma_max,
            drafter_version=self.version,
        )
