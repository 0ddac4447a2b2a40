"""An erased tenant is nowhere: not in the stream, the buffer or the file, nor in any version that could be served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from learner.buffer import PROBE_EVERY, Arrival, Buffer
from learner.consumer import Consumer
from learner.database import Database
from learner.erasure import Erasure
from learner.fleet import Fleet
from learner.lineage import ANYBODY, learnt_from, origin_of, tenants_of
from learner.parts import resumed
from learner.release import Releases
from learner.rollout import Rollout
from learner.schedule import Progress
from learner.shelf import Shelf
from ops.erase import erase
from shared.artifact import Artifact, Manifest, pack_blob
from shared.config import RolloutConfig
from shared.errors import ServiceDown
from shared.store import Champion, Store
from shared.trace import encode
from tests.learner.test_buffer import arrival
from tests.learner.test_rollout import BASE, RecordingJournal, adapter


class ErasingJournal(RecordingJournal):
    """An MLflow that answers when the test says so."""

    records = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.done: list[str] = []

    def erase(self, tenant: str) -> None:
        self.asked.append(tenant)

    def erased(self) -> list[str]:
        found, self.done = self.done, []
        return found


class Life:
    """The parts of a learner that an erasure touches; the folder is what survives."""

    def __init__(self, home: Path, store: Store) -> None:
        self.database = Database(home / "target" / "base" / "buffer.sqlite")
        self.buffer = Buffer(self.database, recent=1000, reservoir=0)
        self.shelf, self.journal, self.store = Shelf(self.database, BASE), ErasingJournal(), store
        self.rollout = Rollout(BASE, store, self.shelf, self.journal)
        self.fleet = Fleet(past_tokens=1000, grace_s=4.0)
        self.releases = Releases(
            BASE,
            self.rollout,
            self.shelf,
            self.fleet,
            database=self.database,
            store=store,
            journal=self.journal,
            config=RolloutConfig(watch_tokens=1000),
        )
        self.forgotten: list[object] = []
        memory = SimpleNamespace(forget=self.forgotten.append)  # what a consumer and a bank hold of it
        self.erasure = Erasure(
            self.database,
            self.buffer,
            cast(Consumer, memory),
            self.shelf,
            self.rollout,
            self.releases,
            cast(Any, memory),
            self.journal,
            store,
            home,
        )
        self.erasure.start()

    def promote(self, parent: str, *tenants: str) -> Champion:
        """A version that continues `parent` on these tenants' requests."""
        artifact = adapter(self.shelf.next_version(), seed=self.rollout.champion.number)
        origin = origin_of(self.shelf.artifact(parent), tenants)
        return self.releases.promote(
            replace(artifact, manifest=replace(artifact.manifest, origin=origin)), {"reason": "better"}
        )

    def serve_with(self, *replicas: str) -> None:
        """From now on these replicas are there, so that a promotion is watched."""
        served = {"drafter_version": self.rollout.champion.version}
        self.fleet.look({f"replica:{name}": served for name in replicas}, {})
        self.releases.look()

    def ask(self, tenant: str = "acme", at: float = 10**9) -> None:
        self.store.ask_erasure(tenant, at)


@pytest.fixture
def life(tmp_path: Path, store: Store) -> Iterator[Life]:
    found = Life(tmp_path, store)
    yield found
    found.database.close()


def of(tenant: str, number: int) -> Arrival:
    item = arrival(number)
    record = replace(item.record, tenant=tenant)
    return replace(item, record=record, data=encode(record))


def test_lineage_goes_from_parent_to_child_and_silence_is_anybody() -> None:
    manifest = Manifest("v1", "eagle3", "lora", "t", origin=origin_of(None, ["acme"]))
    parent = Artifact(manifest, {})
    child = replace(manifest, origin=origin_of(parent, ["other"]))
    assert tenants_of(child) == {"acme", "other"}
    assert not learnt_from(manifest, "other")
    silent = replace(manifest, origin={})
    assert tenants_of(silent) == {ANYBODY}
    assert learnt_from(silent, "whoever")
    assert learnt_from(replace(manifest, origin=origin_of(Artifact(silent, {}), ["b"])), "whoever")


def test_the_champion_goes_back_to_the_newest_version_that_has_not_learnt_from_the_tenant(life: Life) -> None:
    life.promote("base", "other")
    second = life.promote("v1", "other")
    life.promote("v2", "acme")
    fourth = life.promote("v3", "other")  # continues what had learnt from acme
    gone = [entry.blob_hash for name in ("v3", "v4") if (entry := life.shelf.get(name)) is not None]
    life.ask()
    assert life.erasure.obey() == ["acme"]
    champion = life.store.champion()
    assert champion is not None
    assert (champion.version, champion.blob, champion.previous) == ("v2", second.blob, "v1")
    assert champion.number > fourth.number
    assert not set(gone) & set(life.store.blobs())
    assert all(life.store.get_blob(digest) is None for digest in gone)
    assert life.shelf.get("v3") is None
    assert life.shelf.get("v4") is None
    assert life.journal.pointed[-1] == ("v2", "v1")
    assert life.rollout.rollback("a drill").version == "v1", "nothing can bring an erased version back"
    assert life.erasure.obey() == [], "once is enough"


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([("base", "acme")], ("base", "")),
        ([("base", "acme"), ("base", "other")], ("v2", "base")),
        ([("base", "other"), ("base", "acme"), ("v1", "other")], ("v3", "v1")),
        ([("base", "other"), ("v1", "other")], ("v2", "v1")),
    ],
)
def test_neither_the_champion_nor_the_one_before_it_is_tainted(
    life: Life, lines: list[tuple[str, str]], left: tuple[str, str]
) -> None:
    for parent, tenant in lines:
        life.promote(parent, tenant)
    number = life.rollout.champion.number
    life.ask()
    life.erasure.obey()
    champion = life.store.champion()
    assert champion == life.rollout.champion
    assert champion is not None
    assert (champion.version, champion.previous) == left
    assert (champion.number == number) == ("acme" not in [tenant for _, tenant in lines])


def test_a_version_that_does_not_say_what_it_learnt_from_goes_too(life: Life) -> None:
    life.promote("base", "other")
    life.releases.force(pack_blob(adapter("x")), "a drill")
    life.ask()
    life.erasure.obey()
    assert life.rollout.champion.version == "v1"


def test_what_had_not_held_does_not_come_back(life: Life) -> None:
    life.promote("base", "other")
    life.promote("base", "third")
    life.releases.rollback("v2 is bad")
    life.promote("v1", "acme")
    life.ask()
    life.erasure.obey()
    assert (life.rollout.champion.version, life.rollout.champion.previous) == ("v1", "base")


def test_the_way_back_leads_past_what_an_earlier_erasure_took(life: Life) -> None:
    for parent, tenant in (("base", "other"), ("base", "acme"), ("v1", "third")):
        life.promote(parent, tenant)
    life.ask("acme")
    life.erasure.obey()
    life.ask("third")
    life.erasure.obey()
    assert life.rollout.champion.version == "v1"
    assert life.promote("v1", "other").version == "v4", "a replica may still hold the v3 that is gone"


def test_an_attempt_that_a_canary_serves_is_not_made_again_after_a_kill(life: Life) -> None:
    life.promote("base", "other")
    life.serve_with("r1", "r2")
    artifact = adapter("v2")
    origin = {"attempt": 7, "trained_to": 90, **origin_of(None, ["other"])}
    life.releases.promote(replace(artifact, manifest=replace(artifact.manifest, origin=origin)), {"reason": "better"})
    assert life.rollout.champion.version == "v1"
    leading = life.shelf.artifact(life.releases.leading.version)
    killed = Progress(attempts=7, running=True)
    after = resumed(killed, leading)
    assert (after.running, after.last, after.promotions, after.trained_to) == (False, "promoted", 1, 90)
    assert resumed(replace(killed, attempts=8), leading).running, "another one is"


def test_a_canary_of_the_tenant_is_taken_back_at_once(life: Life) -> None:
    life.promote("base", "other")
    life.serve_with("r1", "r2")
    staged = life.promote("v1", "acme")
    canary = life.store.canary()
    assert canary is not None
    assert canary.pointer == staged
    life.ask()
    life.erasure.obey()
    assert life.store.canary() is None
    assert life.releases.watching is None
    champion = life.store.champion()
    assert champion is not None
    assert champion.version == "v1"
    assert champion.number > staged.number
    assert life.store.get_blob(staged.blob) is None
    again = Releases(
        BASE,
        life.rollout,
        life.shelf,
        life.fleet,
        database=life.database,
        store=life.store,
        journal=life.journal,
        config=RolloutConfig(watch_tokens=1000),
    )
    assert again.watching is None, "nor does a restart bring it back"


def test_an_erased_tenant_outweighs_a_pin_and_the_pin_stays(life: Life) -> None:
    life.promote("base", "other")
    life.promote("v1", "acme")
    life.releases.pin("a drill")
    life.ask()
    life.erasure.obey()
    assert life.rollout.champion.version == "v1"
    assert life.releases.barred().startswith("pinned: v1 stays")


def test_no_row_and_no_byte_of_the_tenant_is_left_and_others_keep_theirs(life: Life, tmp_path: Path) -> None:
    life.buffer.add([of("acme" if number % 2 else "other", number) for number in range(1, 25)])
    features = life.buffer.load(1).features
    assert features is not None
    needle = features.numpy().tobytes()[:48]
    path = life.database.path

    def found() -> bool:
        return any(needle in file.read_bytes() for file in path.parent.iterdir() if "shm" not in file.name)

    assert found()
    probes = life.buffer.counts()["chat"]["probe"]
    assert probes == 24 // PROBE_EVERY
    life.ask()
    life.erasure.obey()
    receipt = life.store.erasure_receipt("acme")
    assert receipt is not None
    assert receipt["records"] == 12
    assert receipt["disk"] == "overwritten"
    assert not found()
    assert sum(life.buffer.counts()["chat"].values()) == 12
    rows = life.database.rows("SELECT DISTINCT tenant FROM ledger")
    assert [row["tenant"] for row in rows] == ["other"]
    assert life.forgotten[0] == "acme"
    life.buffer.add([of("other", number) for number in range(25, 49)])
    assert life.buffer.counts()["chat"]["probe"] > probes // 2, "others take the probes' places"


def test_what_comes_late_is_dropped_and_what_comes_after_is_not(life: Life) -> None:
    life.ask(at=100.0)
    life.erasure.obey()
    late, after, other = of("acme", 99).record, of("acme", 101).record, of("other", 99).record
    for buffer in (life.buffer, Buffer(life.database, recent=1, reservoir=0)):  # and after a restart
        assert [buffer.erased(record) for record in (late, after, other)] == [True, False, False]


def test_the_stream_is_rid_of_the_tenant(life: Life) -> None:
    for number in range(1, 7):
        item = of("acme" if number % 2 else "other", number)
        life.store.append_trace(item.data, max_bytes=2**24, tenant=item.record.tenant)
    life.ask()
    life.erasure.obey()
    assert len(life.store.peek_traces("", count=9)) == 3
    assert not any(b"acme" in data for _, data in life.store.peek_traces("", count=9))


def test_buffers_of_other_bases_are_rid_of_it_and_broken_ones_go_whole(life: Life, tmp_path: Path) -> None:
    other = Database(tmp_path / "target" / "earlier" / "buffer.sqlite")
    Buffer(other, recent=9, reservoir=0).add([of("acme", 1), of("other", 2)])
    other.close()
    foreign = tmp_path / "target" / "ancient" / "buffer.sqlite"
    strange = Database(foreign)
    strange.run("PRAGMA user_version = 7")
    strange.close()
    broken = tmp_path / "target" / "base" / "buffer.broken-1"
    broken.write_bytes(b"acme")
    life.ask()
    life.erasure.obey()
    receipt = life.store.erasure_receipt("acme")
    assert receipt is not None
    assert receipt["records"] == 1
    assert not broken.exists()
    assert not foreign.exists()
    again = Database(tmp_path / "target" / "earlier" / "buffer.sqlite")
    assert [row["tenant"] for row in again.rows("SELECT tenant FROM records")] == ["other"]
    again.close()


def test_killed_halfway_it_is_done_again_and_mlflow_is_told_in_the_next_life(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(tmp_path, store)
    first.promote("base", "acme")
    first.ask()

    def gone(*_: object) -> None:
        raise ServiceDown("a drill")

    with monkeypatch.context() as patch:
        patch.setattr(store, "erase_blobs", gone)
        with pytest.raises(ServiceDown):
            first.erasure.obey()
    assert store.erasure_receipt("acme") is None
    first.database.close()
    second = Life(tmp_path, store)
    assert second.erasure.obey() == ["acme"]
    assert store.blobs() == []
    assert second.journal.asked == ["acme"]
    receipt = store.erasure_receipt("acme")
    assert receipt is not None
    assert receipt["mlflow"] == "waits"
    second.database.close()
    third = Life(tmp_path, store)
    assert third.journal.asked == ["acme"], "MLflow had not confirmed"
    third.journal.done = ["acme"]
    third.erasure.obey()
    receipt = store.erasure_receipt("acme")
    assert receipt is not None
    assert receipt["mlflow"] == "erased"
    third.database.close()
    fourth = Life(tmp_path, store)
    assert fourth.journal.asked == []
    fourth.database.close()


def test_the_command_waits_for_the_learner_and_says_when_there_is_none(life: Life) -> None:
    life.store.append_trace(of("acme", 1).data, max_bytes=2**24, tenant="acme")
    assert erase(life.store, "acme", 0.0) is None
    assert life.store.peek_traces("", count=1) == [], "the stream at least"
    assert set(life.store.erasures_asked()) == {"acme"}, "the rest waits for a learner"
    ended = threading.Event()

    def learn() -> None:
        while not ended.wait(0.05):
            if life.erasure.obey():
                return

    # SQLite's connection belongs to no thread; only one uses it at a time.
    thread = threading.Thread(target=learn)
    thread.start()
    receipt = erase(life.store, "acme", 30.0)
    ended.set()
    thread.join()
    assert receipt is not None
    assert receipt["champion"] == "base"
