"""Where the learner stands with its traffic: what is fresh, what has drifted, and how its attempts have gone.

Kept in the database, so that a restart goes on from it. It decides nothing: `learner.schedule` does, from `situation`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from learner.buffer import Buffer
from learner.database import Database
from learner.lookout import Lookout
from learner.schedule import Progress, Situation

PROGRESS, SETTLED = "progress", "settled"


@dataclass
class Standing:
    database: Database
    buffer: Buffer
    lookout: Lookout
    progress: Progress

    def situation(self) -> Situation:
        fresh = self.buffer.fresh_tokens(self.progress.trained_to)
        return Situation(
            fresh=fresh,
            drifted=tuple(domain for domain in self.lookout.drifted() if domain in fresh),
            lagging=tuple(domain for domain in self.lookout.lagging() if domain in fresh),
            last=self.progress.last,
            refusals=self.progress.refusals,
            tried=self.progress.tried,
        )

    def keep(self, progress: Progress) -> None:
        self.progress = progress
        with self.database.transaction():
            self.database.keep_state(PROGRESS, asdict(progress))
            if not progress.running:
                self.buffer.end_attempt()

    def settle(self) -> None:
        """What has drifted is the normal from now on."""
        settled: dict[str, int] = self.database.state(SETTLED) or {}
        for domain in self.lookout.drifted():
            self.lookout.settle(domain)
            settled[domain] = self.buffer.newest()
        self.database.keep_state(SETTLED, settled)
