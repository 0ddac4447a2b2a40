"""`redraft drafters` at a running learner and at a shelf on disk: the same versions, and orders that are followed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.orders import follow
from ops import cli
from ops.drafter_diff import weight_changes
from shared.artifact import load_folder
from shared.errors import RedraftError
from shared.store import Store
from tests.learner.test_release import Life, Replicas
from tests.learner.test_rollout import adapter


@pytest.fixture
def life(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """A learner that has promoted two versions, in the home where its file is looked for."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    found = Life(tmp_path / "learner" / "target" / "base" / "buffer.sqlite", store, Replicas(store))
    for version, alpha in (("v1", 0.25), ("v2", 0.375)):
        facts = {"parent": "base", "alpha_before": 0.2, "alpha_after": alpha, "reason": f"promoted: {version}"}
        found.releases.promote(adapter(version, seed=int(version[1:])), facts)
    yield found
    found.database.close()


@pytest.fixture
def obeying(life: Life, redis_url: str) -> Iterator[list[str]]:
    """The flags that lead to it, while it follows orders."""
    parts: Any = SimpleNamespace(releases=life.releases, rollout=life.rollout, shelf=life.shelf)
    stop = threading.Event()

    def obey() -> None:
        while not stop.wait(0.005):
            order = life.store.orders.take()
            if order is not None:
                try:
                    life.store.orders.answer(order, follow(order, parts, life.store), done=True)
                except RedraftError as error:
                    life.store.orders.answer(order, str(error), done=False)

    thread = threading.Thread(target=obey)
    thread.start()
    prefix = life.store._champion.removesuffix(":champion")
    yield ["--set", f"redis.url={redis_url}", "--set", f"redis.prefix={prefix}"]
    stop.set()
    thread.join()


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, Any]]:
    assert cli.run(["drafters", "list", "--json", *flags]) == 0
    return {facts["version"]: facts for facts in json.loads(capsys.readouterr().out)}


def test_the_list_says_what_each_version_is_now(
    life: Life, obeying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, *obeying)
    assert {name: facts["state"] for name, facts in found.items()} == {"base": "", "v1": "previous", "v2": "champion"}
    assert (found["v2"]["alpha_before"], found["v2"]["alpha_after"]) == (0.2, 0.375)
    assert listed(capsys) == found, "the shelf on disk says the same"
    assert cli.run(["drafters", "list", *obeying]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("v2", "0.375", "champion"))


def test_orders_move_the_pointer_and_a_pin_holds_it(
    life: Life, obeying: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["drafters", "rollback", "--reason", "a drill", *obeying]) == 0
    assert "v1 serves" in capsys.readouterr().out
    assert cli.run(["drafters", "promote", "v2", *obeying]) == 0
    assert cli.run(["drafters", "pin", *obeying]) == 0
    capsys.readouterr()
    assert listed(capsys, *obeying)["v2"]["state"] == "champion, pinned"
    assert cli.run(["drafters", "promote", "v1", *obeying]) == cli.REFUSED
    assert "v2 is pinned" in capsys.readouterr().err
    assert cli.run(["drafters", "unpin", *obeying]) == 0
    assert cli.run(["drafters", "promote", "base", *obeying]) == 0
    assert "base serves" in capsys.readouterr().out
    champion = life.store.champion()
    assert champion is not None
    assert (champion.version, champion.previous, champion.number) == ("base", "v2", 5)


def test_what_is_exported_can_be_promoted_again(
    life: Life, obeying: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    assert cli.run(["drafters", "export", "v1", str(folder), *obeying]) == 0
    exported, digest = load_folder(folder)
    entry = life.shelf.get("v1")
    assert entry is not None
    assert digest == entry.blob_hash
    assert cli.run(["drafters", "promote", str(folder), *obeying]) == 0
    capsys.readouterr()
    found = listed(capsys, *obeying)["v3"]
    assert found["state"] == "champion"
    assert found["reason"].startswith("forced: ")
    assert found["blob"] == digest
    assert exported.manifest.version == "v1"


def test_show_and_diff_name_the_facts_and_the_weights(life: Life, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["drafters", "show", "v2"]) == 0
    assert "promoted: v2" in capsys.readouterr().out
    assert cli.run(["drafters", "diff", "v1", "v2"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("alpha_after", "0.25", "0.375", "lm_head"))
    assert cli.run(["drafters", "show", "v9"]) == cli.REFUSED
    assert "v9 is not on the shelf" in capsys.readouterr().err


def test_without_a_stack_nothing_can_be_ordered(life: Life, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["drafters", "rollback"]) == cli.REFUSED
    assert "no stack runs" in capsys.readouterr().err


def test_a_version_does_not_differ_from_itself_and_the_base_adds_nothing() -> None:
    one = adapter("v1", seed=1)
    for name in one.tensors:
        one.tensors[name].fill_(0.5)
    # Rank 2, lora_alpha 4: each element of what is added is 4 / 2 * 2 * 0.5 * 0.5 = 1.
    changes = dict(weight_changes(None, one))
    rows, columns = one.tensors["lm_head.lora_B"].shape[0], one.tensors["lm_head.lora_A"].shape[1]
    assert changes["lm_head"] == pytest.approx((rows * columns) ** 0.5)
    assert {change for _, change in weight_changes(one, one)} == {0.0}
    assert {change for _, change in weight_changes(one, None)} == {1.0}
