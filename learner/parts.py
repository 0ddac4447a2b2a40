"""Everything that a learner with a drafter consists of, put together once the base is loaded.

Owns the order of building and the place of the buffer on disk: one folder for a target and a base, because what was
measured and promoted for one base says nothing about another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from learner.attempt import AttemptRunner, Prepare
from learner.bank import DrafterBank
from learner.base import Base
from learner.budget import Budget
from learner.buffer import Buffer, Measured
from learner.consumer import Consumer
from learner.database import Database
from learner.economy import Decoding, Economy, Expected
from learner.erasure import Erasure
from learner.features import FeatureInbox, FrozenTarget
from learner.fleet import Fleet
from learner.journal import Journal
from learner.lookout import HISTORY, Lookout
from learner.measure import Measurer, gamma_of
from learner.release import Releases
from learner.rollout import Rollout
from learner.schedule import Progress
from learner.shelf import Shelf
from learner.standing import PROGRESS, SETTLED, Standing
from shared.artifact import Artifact
from shared.config import Config
from shared.store import Store

_ECONOMY = "economy"
HEARTBEATS_S = 3.0  # until a replica's new version is in its heartbeat and that has been read


@dataclass
class Parts(Standing):
    base: Base
    shelf: Shelf
    measurer: Measurer
    consumer: Consumer
    runner: AttemptRunner
    rollout: Rollout
    fleet: Fleet
    releases: Releases
    erasure: Erasure
    budget: Budget
    economy: Economy

    def account(self, decoding: Decoding, after: int) -> dict[str, float]:
        """Takes a window's counts, and what was measured later than `after`, into the economy; returns what it says."""
        self.economy.window(decoding, Expected(*self.buffer.expected_since(after)))
        kept = {"training_s": self.budget.spent_s, "economy": asdict(self.economy)}
        self.database.keep_state(_ECONOMY, kept)
        return self.economy.report(self.budget.spent_s)


def buffer_file(home: Path, base: Base) -> Path:
    return home / "learner" / base.target.partition(":")[0][:16] / base.hash[:16] / "buffer.sqlite"


def assemble(
    config: Config, base: Base, *, store: Store, journal: Journal, inbox: FeatureInbox, prepare: Prepare
) -> Parts:
    """Opens the buffer where it was left. Raises ConfigError for one of another release."""
    database = Database(buffer_file(config.home_path, base))
    learner = config.learner
    buffer = Buffer(database, recent=learner.buffer_recent, reservoir=learner.buffer_reservoir)
    shelf = Shelf(database, base)
    bank = DrafterBank(base, shelf.artifact)
    measurer = Measurer(base, bank, gamma=gamma_of(config.drafter), champion=lambda: shelf.champion.version)
    lookout = Lookout.rebuild(buffer.history(HISTORY), database.state(SETTLED) or {})

    def watch(domain: str, measured: Measured) -> None:
        lookout.update(domain, measured.live_sum, measured.positions)

    consumer = Consumer(
        store=store,
        buffer=buffer,
        measurer=measurer,
        base=base,
        inbox=inbox,
        frozen=FrozenTarget(config, base.feature_layers),
        recompute_all=config.trace.feature_share == 0,
        listener=watch,
    )
    kept = database.state(_ECONOMY) or {}
    rollout = Rollout(base, store, shelf, journal)
    fleet = Fleet(past_tokens=config.rollout.watch_tokens, grace_s=config.drafter.swap_poll_s + HEARTBEATS_S)
    releases = Releases(
        base, rollout, shelf, fleet, database=database, store=store, journal=journal, config=config.rollout
    )
    folder = config.home_path / "learner"
    erasure = Erasure(database, buffer, consumer, shelf, rollout, releases, bank, journal, store, folder)
    parts = Parts(
        base=base,
        database=database,
        buffer=buffer,
        shelf=shelf,
        measurer=measurer,
        consumer=consumer,
        runner=AttemptRunner(config, base, buffer, bank, round_s=lambda: fleet.round_s, prepare=prepare),
        rollout=rollout,
        fleet=fleet,
        releases=releases,
        lookout=lookout,
        erasure=erasure,
        budget=Budget(learner.budget_share, spent_s=kept.get("training_s", 0.0)),
        economy=Economy.kept(kept.get("economy", {})),
        progress=Progress.kept(database.state(PROGRESS) or {}),
    )
    parts.keep(resumed(parts.progress, shelf.artifact(releases.leading.version)))
    erasure.start()
    return parts


def resumed(progress: Progress, leading: Artifact | None) -> Progress:
    """An attempt whose candidate already is served, by all or by a canary, was promoted before the kill: it is not made
    again."""
    origin = leading.manifest.origin if leading is not None else {}
    if progress.running and origin.get("attempt") == progress.attempts:
        return progress.ended("promoted", int(origin["trained_to"]), "promoted: just before a restart")
    return progress.resumed()
