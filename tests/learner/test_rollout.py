"""One decision, three places: the shelf, Redis and MLflow, whichever of them is away, empty or ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from learner.base import Base
from learner.database import Database
from learner.journal import Journal
from learner.lora import LoraSettings, add_lora, export_lora
from learner.rollout import Rollout
from learner.shelf import KEPT, Shelf, Shelved
from shared.artifact import Artifact, Manifest, hash_blob, open_blob, pack_blob
from shared.errors import ConfigError, ServiceDown
from shared.store import Champion, Store
from tests.learner.records import tiny_head

BASE = Base("eagle3", "b" * 64, "t" * 64 + ":fp16", 60, 0, (0, 1, 2), 36, tiny_head(), None)


def adapter(version: str, base: str = BASE.hash, seed: int = 0) -> Artifact:
    head, settings = tiny_head(), LoraSettings(rank=2, lora_alpha=4, seed=seed)
    add_lora(head, settings)
    return export_lora(head, settings, Manifest(version, "eagle3", "lora", BASE.target, base=base))


class RecordingJournal(Journal):
    """Takes everything and delivers nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self.versions: list[str] = []
        self.pointed: list[tuple[str, str]] = []
        self.arrived: list[str] = []
        self.mlflow: tuple[Champion, bytes] | None = None

    def version(self, entry: Shelved) -> None:
        self.versions.append(entry.version)

    def aliases(self, champion: str, previous: str) -> None:
        self.pointed.append((champion, previous))

    def registered(self) -> list[str]:
        found, self.arrived = self.arrived, []
        return found

    def champion(self, base: str) -> tuple[Champion, bytes] | None:
        return self.mlflow


class Life:
    """A learner's rollout between a start and an end; the file is what survives."""

    def __init__(self, path: Path, store: Store) -> None:
        self.database = Database(path)
        self.shelf, self.journal, self.store = Shelf(self.database, BASE), RecordingJournal(), store
        self.rollout = Rollout(BASE, store, self.shelf, self.journal)

    def promote(self) -> Champion:
        version = self.shelf.next_version()
        blob, previous = pack_blob(adapter(version, seed=int(version[1:]))), self.rollout.champion.version
        return self.rollout.install(self.rollout.stage(version, blob, {"reason": "better"}, previous=previous))


Live = Callable[[], Life]


@pytest.fixture
def live(tmp_path: Path, store: Store) -> Iterator[Live]:
    lives: list[Life] = []

    def begin() -> Life:
        if lives:
            lives[-1].database.close()
        lives.append(Life(tmp_path / "buffer.sqlite", store))
        return lives[-1]

    yield begin
    lives[-1].database.close()


def erase(store: Store) -> None:
    """Redis comes back empty."""
    client = store._link.client
    for key in client.scan_iter(match=store._champion.rpartition(":")[0] + ":*"):
        client.delete(key)


def test_before_the_first_promotion_there_is_no_pointer(live: Live) -> None:
    life = live()
    assert life.rollout.reconcile() is None
    assert life.store.champion() is None
    assert (life.rollout.champion.version, life.rollout.champion.number) == ("base", 0)


def test_a_promotion_is_on_the_shelf_in_redis_and_on_its_way_to_mlflow(live: Live) -> None:
    life = live()
    first, second = life.promote(), life.promote()
    assert (first.version, first.number, first.previous) == ("v1", 1, "base")
    assert (second.version, second.number, second.previous) == ("v2", 2, "v1")
    assert life.store.champion() == second
    blob = life.store.get_blob(second.blob)
    assert blob is not None
    assert open_blob(blob, second.blob).manifest.version == "v2"
    assert life.journal.versions == ["v1", "v2"]
    assert life.journal.pointed == [("v1", "base"), ("v2", "v1")]
    shelved = life.shelf.get("v2")
    assert shelved is not None
    assert shelved.facts["reason"] == "better"


def test_an_empty_redis_is_filled_again_with_pointer_and_blobs(live: Live) -> None:
    life = live()
    life.promote()
    champion = life.promote()
    erase(life.store)
    assert life.store.champion() is None
    life.rollout.reconcile()
    assert life.store.champion() == champion
    for version in ("v1", "v2"):
        entry = life.shelf.get(version)
        assert entry is not None
        assert life.store.get_blob(entry.blob_hash) == entry.blob


def test_a_restart_publishes_what_was_decided_while_redis_was_away(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    life = live()
    with monkeypatch.context() as patch:
        patch.setattr(life.store, "champion", _away)
        champion = life.promote()
    assert life.store.champion() is None
    again = live()
    assert again.rollout.champion == champion
    again.rollout.reconcile()
    assert again.store.champion() == champion
    assert again.journal.versions == ["v1"], "MLflow has not confirmed it, so it is told again"
    assert again.journal.pointed == [("v1", "base")]
    again.journal.arrived = ["v1"]
    again.rollout.reconcile()
    assert live().journal.versions == []


def _away() -> None:
    raise ServiceDown("on purpose")


def test_a_lost_disk_learns_its_champion_from_redis(live: Live, tmp_path: Path) -> None:
    champion = live().promote()
    (tmp_path / "buffer.sqlite").rename(tmp_path / "lost.sqlite")
    life = live()
    assert life.rollout.reconcile() == champion
    assert life.rollout.champion == champion
    assert life.shelf.artifact("v1") is not None
    assert life.shelf.next_version() == "v2"
    assert life.rollout.reconcile() is None


def test_a_lost_disk_and_an_empty_redis_learn_it_from_mlflow(live: Live, tmp_path: Path, store: Store) -> None:
    champion = live().promote()
    blob = store.get_blob(champion.blob)
    assert blob is not None
    erase(store)
    (tmp_path / "buffer.sqlite").rename(tmp_path / "lost.sqlite")
    life = live()
    assert life.rollout.reconcile() is None, "MLflow has not answered yet"
    life.journal.mlflow = (champion, blob)
    assert life.rollout.reconcile() == champion
    assert store.champion() == champion
    assert store.get_blob(champion.blob) == blob


@pytest.mark.parametrize("case", ["torn", "another base", "no blob"])
def test_a_newer_pointer_that_cannot_be_followed_is_outnumbered(live: Live, store: Store, case: str) -> None:
    life = live()
    mine = life.promote()
    blob = pack_blob(adapter("v9", base="c" * 64 if case == "another base" else BASE.hash))
    store.put_blob(blob)
    foreign = replace(mine, version="v9", number=7, blob=hash_blob(blob), base=open_blob(blob).manifest.base)
    if case == "torn":
        store._link.client.set(store._blob + foreign.blob, blob[:-4])
    if case == "no blob":
        store._link.client.delete(store._blob + foreign.blob)
    assert store.set_champion(foreign)
    assert life.rollout.reconcile() is None
    assert store.champion() == replace(mine, number=8)
    assert life.rollout.champion == store.champion()


@pytest.mark.parametrize("number", ['"seven"', "[7]", "1e3", "null"])
def test_a_pointer_with_a_number_that_is_none_is_replaced(live: Live, store: Store, number: str) -> None:
    life = live()
    store._link.client.set(store._champion, f'{{"version": "v7", "number": {number}}}')
    assert life.rollout.reconcile() is None, "nothing here to replace it with"
    mine = life.promote()
    assert store.champion() == mine
    store._link.client.set(store._champion, f'{{"version": "v7", "number": {number}}}')
    assert life.rollout.reconcile() is None
    assert store.champion() == mine


def test_a_rollback_is_a_new_number_and_can_end_at_the_base(live: Live) -> None:
    life = live()
    first = life.promote()
    life.promote()
    back = life.rollout.rollback("it was worse")
    assert (back.version, back.number, back.previous, back.blob) == ("v1", 3, "v2", first.blob)
    assert life.store.champion() == back
    assert life.journal.pointed[-1] == ("v1", "v2")
    assert life.shelf.next_version() == "v3"


def test_a_rollback_to_the_base_points_at_no_blob(live: Live) -> None:
    life = live()
    with pytest.raises(ConfigError, match="no version before base"):
        life.rollout.rollback("nothing to undo")
    life.promote()
    back = life.rollout.rollback("it was worse")
    assert (back.version, back.blob, back.number, back.previous) == ("base", "", 2, "v1")
    assert life.store.champion() == back
    assert life.rollout.reconcile() is None


def test_a_staged_version_serves_nobody_and_no_later_pointer_has_its_number(live: Live) -> None:
    life = live()
    first = life.promote()
    staged = life.rollout.stage("v2", pack_blob(adapter("v2")), {"reason": "better"}, previous="v1")
    assert life.rollout.champion == life.store.champion() == first
    assert (staged.number, staged.previous) == (2, "v1")
    assert life.journal.versions == ["v1", "v2"]
    assert life.journal.pointed == [("v1", "base")]
    assert life.promote().number == 3
    with pytest.raises(ConfigError, match="v9 is not on the shelf"):
        life.rollout.point_to("v9", previous="v1")


def test_the_shelf_keeps_the_newest_and_what_mlflow_does_not_have(live: Live) -> None:
    life = live()
    for number in range(KEPT + 3):
        life.promote()
        if number != 0:
            life.shelf.mark_registered(f"v{number + 1}")
    life.promote()
    kept = [version for version in (f"v{n}" for n in range(1, KEPT + 5)) if life.shelf.get(version) is not None]
    assert kept == ["v1", *(f"v{n}" for n in range(5, KEPT + 5))]


def test_a_blob_that_went_bad_on_disk_is_no_artifact(live: Live) -> None:
    life = live()
    life.promote()
    life.database.run("UPDATE versions SET blob = substr(blob, 1, 50)")
    assert life.shelf.artifact("v1") is None
