"""A new version goes to one replica, or is held against the past; what falls goes back by itself, and stays back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.database import Database
from learner.fleet import Fleet
from learner.registry import AttemptEntry
from learner.release import GONE_S, Releases
from learner.rollout import Rollout
from learner.shelf import Shelf
from learner.watch import TAKE_S
from shared.artifact import pack_blob
from shared.config import RolloutConfig
from shared.counters import Counters
from shared.errors import ArtifactError, ConfigError
from shared.live_alpha import add_request
from shared.store import Champion, Store
from tests.learner.test_rollout import BASE, RecordingJournal, adapter

CONFIG = RolloutConfig(watch_tokens=1000, cooldown_tokens=500)
GRACE_S = 4.0
TESTED = 20  # of each request: 50 of them are a watch, 13 its first look


class Replicas:
    """What replicas report; each follows the pointers when it is told to."""

    def __init__(self, store: Store, *names: str) -> None:
        self.store = store
        self.versions = dict.fromkeys(names, "base")
        self.counters = {name: Counters() for name in names}
        self._rng = np.random.default_rng(0)

    def follow(self) -> None:
        champion, canary = self.store.champion(), self.store.canary()
        for name in self.versions:
            pointer = canary.pointer if canary is not None and canary.replica == name else champion
            self.versions[name] = pointer.version if pointer is not None else "base"

    def serve(self, requests: int, alphas: dict[str, float], *, plain: int = 0) -> None:
        """Each replica serves so many requests, with the alpha of its version and `plain` steps without a draft."""
        for name, version in self.versions.items():
            for _ in range(requests):
                accepted = int(self._rng.binomial(TESTED, alphas[version]))
                steps = TESTED - accepted + plain
                add_request(self.counters[name], "chat", version, steps=steps, accepted=accepted, tested=TESTED)
                self.counters[name].add("emitted", steps + accepted, domain="chat")

    def statuses(self) -> dict[str, dict[str, Any]]:
        return {f"replica:{name}": {"drafter_version": version} for name, version in self.versions.items()}

    def epochs(self) -> dict[tuple[str, str], dict[str, float]]:
        return {(name, "1"): dict(counts.fields) for name, counts in self.counters.items()}


class DecisionJournal(RecordingJournal):
    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[AttemptEntry] = []

    def attempt(self, entry: AttemptEntry) -> None:
        self.decisions.append(entry)


class Life:
    """A learner's releases between a start and an end."""

    def __init__(self, path: Path, store: Store, replicas: Replicas, config: RolloutConfig = CONFIG) -> None:
        self.database, self.store, self.replicas, self.now = Database(path), store, replicas, 1000.0
        self.shelf, self.journal = Shelf(self.database, BASE), DecisionJournal()
        self.rollout = Rollout(BASE, store, self.shelf, self.journal)
        self.fleet = Fleet(past_tokens=config.watch_tokens, grace_s=GRACE_S)
        self.releases = Releases(
            BASE,
            self.rollout,
            self.shelf,
            self.fleet,
            database=self.database,
            store=store,
            journal=self.journal,
            config=config,
            clock=lambda: self.now,
        )

    def look(self) -> None:
        self.now += 1.0
        self.fleet.look(self.replicas.statuses(), self.replicas.epochs())
        self.releases.look()

    def serve(self, times: int, alphas: dict[str, float], **how: int) -> None:
        """Ten requests a replica between two looks."""
        for _ in range(times):
            self.replicas.follow()
            self.replicas.serve(10, alphas, **how)
            self.look()

    def promote(self) -> Champion:
        version = self.shelf.next_version()
        return self.releases.promote(adapter(version, seed=int(version[1:])), {"reason": "promoted: alpha"})

    def outcomes(self) -> list[str]:
        return [entry.tags["redraft.decision"] for entry in self.journal.decisions]


Live = Callable[..., Life]


@pytest.fixture
def live(tmp_path: Path, store: Store) -> Iterator[Live]:
    lives: list[Life] = []

    def begin(*names: str) -> Life:
        replicas = lives[-1].replicas if lives else Replicas(store, *names)
        if lives:
            lives[-1].database.close()
        lives.append(Life(tmp_path / "buffer.sqlite", store, replicas))
        return lives[-1]

    yield begin
    lives[-1].database.close()


def test_with_one_replica_a_version_serves_at_once_and_has_held_after_its_window(live: Live, store: Store) -> None:
    life = live("r0")
    life.serve(6, {"base": 0.4})
    pointer = life.promote()
    assert store.champion() == pointer
    assert store.canary() is None
    life.serve(4, {"v1": 0.5})
    assert life.releases.status()["watch"]["version"] == "v1"
    life.serve(2, {"v1": 0.5})
    assert life.releases.watching is None
    assert life.rollout.champion == pointer
    [decision] = life.journal.decisions
    assert (decision.kind, decision.tags["redraft.decision"]) == ("watch", "held")
    assert decision.metrics["watch/alpha_after"] > decision.metrics["watch/alpha_before"]
    assert life.shelf.versions()[0]["watch"].startswith("v1 held: live alpha 0.")


def test_a_version_that_falls_goes_back_by_itself_and_nothing_is_promoted_for_a_while(live: Live, store: Store) -> None:
    life = live("r0")
    life.serve(6, {"base": 0.5})
    life.promote()
    life.serve(2, {"v1": 0.1})  # 20 requests: the first look
    champion = store.champion()
    assert champion is not None
    assert (champion.version, champion.number, champion.previous) == ("base", 2, "v1")
    assert life.outcomes() == ["fell"]
    assert "v1 fell: live alpha " in life.journal.decisions[0].tags["redraft.reason"]
    assert "after a rollback" in life.releases.barred()
    left = life.releases.cooldown
    life.serve(1, {"base": 0.5})
    assert life.releases.cooldown == left - 10 * TESTED
    life.serve(2, {"base": 0.5})
    assert life.releases.barred() == ""


def test_chance_is_no_fall(live: Live) -> None:
    life = live("r0")
    life.serve(6, {"base": 0.45})
    life.promote()
    life.serve(6, {"v1": 0.43})
    assert life.outcomes() == ["held"]


def test_a_drafter_that_is_used_where_drafts_are_harder_has_not_fallen(live: Live) -> None:
    """Gamma auto drafted with the old one in the easiest steps only: a higher alpha, and fewer tokens."""
    life = live("r0")
    life.serve(6, {"base": 0.6}, plain=60)
    life.promote()
    life.serve(6, {"v1": 0.4})
    assert life.outcomes() == ["held"]


def test_with_more_replicas_one_goes_first_and_the_others_follow_when_it_has_held(live: Live, store: Store) -> None:
    life = live("r0", "r1", "r2")
    life.look()
    pointer = life.promote()
    assert store.champion() is None
    assert life.releases.leading == pointer
    life.serve(4, {"base": 0.4, "v1": 0.5})
    canary = store.canary()
    assert canary is not None
    assert canary.pointer == pointer
    assert [name for name, version in life.replicas.versions.items() if version == "v1"] == [canary.replica]
    assert store.get_blob(pointer.blob) is not None
    life.serve(2, {"base": 0.4, "v1": 0.5})
    assert store.champion() == pointer
    assert store.canary() is None
    assert life.releases.leading == pointer, "an attempt that began meanwhile goes on"
    assert life.outcomes() == ["held"]


def test_a_canary_that_falls_never_reaches_the_others(live: Live, store: Store) -> None:
    life = live("r0", "r1")
    life.serve(2, {"base": 0.5})
    life.promote()
    life.serve(2, {"base": 0.5, "v1": 0.1})
    assert life.outcomes() == ["fell"]
    assert store.canary() is None
    assert store.champion() is None
    life.replicas.follow()
    assert set(life.replicas.versions.values()) == {"base"}
    assert life.releases.barred()
    assert life.promote().number == 2


def test_traffic_that_gets_harder_for_all_is_no_fall_of_the_canary(live: Live) -> None:
    life = live("r0", "r1")
    life.serve(4, {"base": 0.6})
    life.promote()
    life.serve(6, {"base": 0.2, "v1": 0.22})
    assert life.outcomes() == ["held"]


@pytest.mark.parametrize("names", [("r0",), ("r0", "r1")])
def test_a_promotion_takes_the_place_of_the_watched_one_and_answers_to_what_has_held(
    live: Live, names: tuple[str, ...]
) -> None:
    life = live(*names)
    life.serve(6, {"base": 0.5})
    life.promote()
    life.serve(1, {"base": 0.5, "v1": 0.3})
    second = life.promote()
    assert (second.number, second.previous) == (2, "base"), "v1 has not held"
    life.serve(2, {"base": 0.5, "v2": 0.2})
    assert life.outcomes() == ["fell"]
    assert life.rollout.champion.version == "base"


def test_a_canary_whose_replica_goes_is_another_one(live: Live, store: Store) -> None:
    life = live("r0", "r1", "r2")
    life.look()
    life.promote()
    first = store.canary()
    assert first is not None
    del life.replicas.versions[first.replica]
    life.look()
    assert store.canary() == first, "a heartbeat may be late"
    life.now += GONE_S
    life.look()
    second = store.canary()
    assert second is not None
    assert second.replica in life.replicas.versions
    assert second.pointer == first.pointer


def test_a_canary_that_does_not_take_the_version_has_fallen(live: Live, store: Store) -> None:
    life = live("r0", "r1")
    life.look()
    life.promote()
    life.now += TAKE_S
    life.look()
    assert life.outcomes() == ["fell"]
    assert "has not served it" in life.journal.decisions[0].tags["redraft.reason"]


def test_what_is_pinned_stays_whatever_the_gate_and_the_watch_find(live: Live, store: Store) -> None:
    life = live("r0")
    life.serve(6, {"base": 0.5})
    pointer = life.promote()
    life.releases.pin("we know better")
    assert life.releases.barred() == "pinned: v1 stays until it is unpinned"
    life.serve(6, {"v1": 0.05})
    assert store.champion() == pointer
    for order in (
        lambda: life.releases.rollback("x"),
        lambda: life.releases.return_to("base", "x"),
        lambda: life.releases.force(pack_blob(adapter("v9")), "x"),
    ):
        with pytest.raises(ConfigError, match="v1 is pinned"):
            order()
    again = live()
    assert again.releases.pinned, "after a restart too"
    again.releases.unpin("enough")
    assert again.releases.barred() == ""
    assert again.releases.rollback("it was bad").version == "base"
    assert again.outcomes() == ["unpinned", "rolled back"]


def test_a_pin_takes_a_canary_back(live: Live, store: Store) -> None:
    life = live("r0", "r1")
    life.look()
    life.promote()
    assert life.releases.pin("not now").version == "base"
    assert store.canary() is None


def test_an_operator_may_force_an_adapter_that_fits_and_no_other(live: Live, store: Store) -> None:
    life = live()
    life.promote()
    forced = life.releases.force(pack_blob(adapter("whatever", seed=9)), "a drill")
    assert (forced.version, forced.number, forced.previous) == ("v2", 2, "v1")
    assert store.champion() == forced
    assert life.shelf.versions()[1]["reason"] == "forced: a drill"
    whole = pack_blob(adapter("v9", base="c" * 64))
    for blob, reason in ((whole, "base"), (whole[:100], "truncated")):
        with pytest.raises(ArtifactError) as caught:
            life.releases.force(blob, "a drill")
        assert caught.value.reason == reason
    assert store.champion() == forced
    assert life.releases.return_to("v1", "the older one").number == 3
    assert life.outcomes() == ["forced", "promoted"]


@pytest.mark.parametrize("names", [("r0",), ("r0", "r1")])
def test_a_watch_goes_on_after_a_restart(live: Live, store: Store, names: tuple[str, ...]) -> None:
    life = live(*names)
    life.serve(6, {"base": 0.5})
    life.promote()
    life.serve(1, {"base": 0.5, "v1": 0.1})
    again = live()
    assert again.releases.watching is not None
    assert life.releases.watching is not None
    assert again.releases.watching.to_keep() == life.releases.watching.to_keep()
    again.serve(1, {"base": 0.5, "v1": 0.1})
    assert again.outcomes() == ["fell"]


def test_without_a_window_all_serve_it_at_once_and_nothing_is_watched(tmp_path: Path, store: Store) -> None:
    life = Life(tmp_path / "b.sqlite", store, Replicas(store, "r0", "r1"), RolloutConfig(watch_tokens=0))
    life.look()
    assert life.promote() == store.champion()
    assert life.releases.watching is None
    life.database.close()


def test_a_kill_between_staging_and_the_watch_leaves_no_version_that_nobody_has_decided_about(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Nothing catches it."""

    def die(*_: object) -> None:
        raise Killed

    life = live("r0", "r1")
    life.look()
    with monkeypatch.context() as patch:
        patch.setattr(life.releases, "_keep", die)
        with pytest.raises(Killed):
            life.promote()
    again = live()
    assert again.shelf.versions() == []
    again.look()
    assert again.promote().version == "v1", "the attempt is made again, to the same version"


def test_a_replica_that_does_not_follow_is_named_and_counted_once(live: Live) -> None:
    life = live("r0", "r1")
    life.look()
    life.releases.force(pack_blob(adapter("v1")), "a drill")
    life.releases.pin("the champion is the base again")
    life.replicas.versions["r1"] = "v1"
    life.look()
    assert life.releases.late == {}
    for _ in range(int(GRACE_S) + 2):
        life.look()
    assert life.releases.late == {"r1": "v1"}
    assert life.fleet.late.total("replicas_late") == 1
    life.replicas.follow()
    life.look()
    assert life.releases.late == {}
