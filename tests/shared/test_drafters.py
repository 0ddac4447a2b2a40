"""Serving and learner find the same base drafter, and a head of another target is never taken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shared.artifact import Artifact, Manifest, load_folder, save_folder
from shared.config import Config, config_from_flat
from shared.drafters import NO_DRAFTER, BaseDrafter, base_hash, resolve_base
from shared.errors import ConfigError
from shared.models.fingerprint import checkpoint_fingerprint
from tests.tiny import build_tiny_model

TARGET = "a" * 64 + ":fp16"


def head(folder: Path, target: str = TARGET) -> Path:
    save_folder(Artifact(Manifest(version="base", kind="eagle3", form="full", target=target), {}), folder)
    return folder


def configured(**drafter: str) -> Config:
    return config_from_flat({f"drafter.{name}": value for name, value in drafter.items()})


def test_the_shipped_head_is_found_by_the_targets_weights_whatever_it_is_called(tmp_path: Path) -> None:
    head(tmp_path / "other", "b" * 64 + ":fp16")
    mine = head(tmp_path / "mine")
    for name, fingerprint in (("alias", TARGET), ("a/hub-name", "a" * 64 + ":int8")):
        assert resolve_base(Config(), name, fingerprint, shipped=tmp_path) == BaseDrafter("eagle3", mine)


def test_a_target_without_a_shipped_head_is_served_plainly_unless_one_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_base(Config(), "tiny", TARGET, shipped=tmp_path) == NO_DRAFTER
    assert "tiny" in caplog.text
    with pytest.raises(ConfigError, match="tiny"):
        resolve_base(configured(kind="eagle3"), "tiny", TARGET, shipped=tmp_path)
    assert resolve_base(configured(kind="none", model="x"), "tiny", TARGET) == NO_DRAFTER


def test_a_folder_with_a_manifest_is_a_head_and_anything_else_a_language_model(tmp_path: Path) -> None:
    mine = head(tmp_path / "mine")
    assert resolve_base(configured(model=str(mine)), "tiny", TARGET) == BaseDrafter("eagle3", mine)
    assert resolve_base(configured(model="a/hub-name"), "tiny", TARGET) == BaseDrafter("model", spec="a/hub-name")


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"kind": "model"}, "no language model is shipped"),
        ({"kind": "eagle3", "model": "a/hub-name"}, r"manifest\.json"),
        ({"kind": "model", "model": "MINE"}, "eagle3 head"),
        ({"model": "THEIRS"}, "another target"),
        ({"model": "TORN"}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(tmp_path: Path, drafter: dict[str, str], message: str) -> None:
    head(tmp_path / "MINE")
    head(tmp_path / "THEIRS", "b" * 64 + ":fp16")
    (head(tmp_path / "TORN") / "manifest.json").write_text("{")
    if drafter.get("model", "").isupper():
        drafter = drafter | {"model": str(tmp_path / drafter["model"])}
    with pytest.raises(ConfigError, match=message):
        resolve_base(configured(**drafter), "tiny", TARGET)


def test_a_base_is_named_by_its_weights(tmp_path: Path) -> None:
    mine = head(tmp_path / "mine")
    assert base_hash(BaseDrafter("eagle3", mine), tmp_path) == load_folder(mine)[1]
    model = build_tiny_model(tmp_path / "model")
    assert base_hash(BaseDrafter("model", spec=str(model)), tmp_path) == checkpoint_fingerprint(model, tmp_path)
    assert base_hash(NO_DRAFTER, tmp_path) == ""
