"""Blobs are whole, are what their hash says, and belong here, or they are refused with a reason that can be counted."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from shared.artifact import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Artifact,
    Manifest,
    check_fit,
    hash_blob,
    load_folder,
    open_blob,
    pack_blob,
    same_target,
    save_folder,
)
from shared.errors import ArtifactError

TARGET = "a" * 64 + ":fp16"
ADAPTER = Artifact(
    Manifest(
        version="v3",
        kind="eagle3",
        form="lora",
        target=TARGET,
        base="b" * 64,
        parent="v2",
        created_at=1.5e9,
        config={"rank": 2, "lora_alpha": 4},
        metrics={"alpha": [3, 10]},
        origin={"command": "learner"},
    ),
    {"fc.lora_A": torch.arange(6.0).view(2, 3), "fc.lora_B": torch.ones(4, 2, dtype=torch.float16)},
)
BLOB = pack_blob(ADAPTER)


def test_round_trip() -> None:
    again = open_blob(BLOB, hash_blob(BLOB))
    assert again.manifest == ADAPTER.manifest
    assert again.tensors.keys() == ADAPTER.tensors.keys()
    for name, tensor in ADAPTER.tensors.items():
        assert torch.equal(again.tensors[name], tensor)
        assert again.tensors[name].dtype == tensor.dtype


def test_equal_artifacts_have_equal_hashes_and_others_do_not() -> None:
    assert hash_blob(pack_blob(ADAPTER)) == hash_blob(BLOB)
    other = replace(ADAPTER, manifest=replace(ADAPTER.manifest, version="v4"))
    assert hash_blob(pack_blob(other)) != hash_blob(BLOB)


def test_views_and_gradients_pack_like_plain_tensors() -> None:
    wide = torch.arange(12.0).view(3, 4).requires_grad_()
    again = open_blob(pack_blob(replace(ADAPTER, tensors={"w": wide[:, ::2]})))
    assert torch.equal(again.tensors["w"], wide[:, ::2])


def test_a_folder_keeps_the_blob_and_a_manifest_for_people(tmp_path: Path) -> None:
    save_folder(ADAPTER, tmp_path / "new" / "head")
    again, digest = load_folder(tmp_path / "new" / "head")
    assert again.manifest == ADAPTER.manifest
    assert digest == hash_blob(BLOB)
    assert json.loads((tmp_path / "new" / "head" / MANIFEST_FILE).read_text()) == asdict(ADAPTER.manifest)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=WEIGHTS_FILE) as caught:
        load_folder(tmp_path)
    assert caught.value.reason == "format"


# --- torn, changed, or no artifact at all ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 40, len(BLOB) // 2, len(BLOB) - 1])
def test_a_torn_blob_is_called_truncated(length: int) -> None:
    with pytest.raises(ArtifactError) as caught:
        open_blob(BLOB[:length])
    assert caught.value.reason == "truncated"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(BLOB) - 1), st.integers(1, 255))
def test_any_changed_byte_is_seen_by_the_hash(place: int, change: int) -> None:
    spoilt = bytearray(BLOB)
    spoilt[place] ^= change
    with pytest.raises(ArtifactError) as caught:
        open_blob(bytes(spoilt), hash_blob(BLOB))
    assert caught.value.reason == "hash"


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BLOB) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_without_a_hash_a_changed_blob_opens_or_is_an_artifact_error(changes: list[tuple[int, int]]) -> None:
    spoilt = bytearray(BLOB)
    for place, value in changes:
        spoilt[place] = value
    open_or_refuse(bytes(spoilt))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_an_artifact_error(noise: bytes) -> None:
    with pytest.raises(ArtifactError):
        open_blob(noise)


def open_or_refuse(blob: bytes) -> None:
    """Never another exception, also when what opened is judged."""
    with suppress(ArtifactError):
        check_fit(open_blob(blob).manifest, kind="eagle3", base="b" * 64, target=TARGET)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(asdict(ADAPTER.manifest))), json_values)
def test_any_value_in_any_manifest_field_opens_or_is_refused(key: str, value: Any) -> None:
    open_or_refuse(with_manifest({**asdict(ADAPTER.manifest), key: value}))


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_a_manifest_that_is_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        open_blob(with_manifest(value))
    assert caught.value.reason == "format"


def with_manifest(tree: Any) -> bytes:
    return save({"w": torch.ones(2)}, metadata={"manifest": json.dumps(tree)})


def manifest_without(key: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(ADAPTER.manifest).items() if name != key}


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (save({"w": torch.ones(2)}), "no readable manifest"),
        (save({"w": torch.ones(2)}, metadata={"manifest": "{"}), "no readable manifest"),
        (with_manifest({**asdict(ADAPTER.manifest), "format": "redraft-drafter/9"}), "redraft-drafter/9"),
        (with_manifest({**asdict(ADAPTER.manifest), "colour": "red"}), r"unknown manifest keys \['colour'\]"),
        (with_manifest(manifest_without("target")), "incomplete manifest"),
        (with_manifest({**asdict(ADAPTER.manifest), "base": None}), "base"),
        (with_manifest({**asdict(ADAPTER.manifest), "config": [1]}), "config"),
    ],
)
def test_what_has_no_proper_manifest_is_called_format(blob: bytes, words: str) -> None:
    with pytest.raises(ArtifactError, match=words) as caught:
        open_blob(blob)
    assert caught.value.reason == "format"


# --- does it belong here? --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"target": "a" * 64 + ":int8"}, None),  # the same weights in another format
        ({"target": "c" * 64 + ":fp16"}, "target"),
        ({"base": "d" * 64}, "base"),
        ({"base": ""}, "base"),
        ({"kind": "model"}, "kind"),
        ({"form": "full"}, "kind"),
    ],
)
def test_check_fit(changes: dict[str, Any], reason: str | None) -> None:
    manifest = replace(ADAPTER.manifest, **changes)
    if reason is None:
        check_fit(manifest, kind="eagle3", base="b" * 64, target=TARGET)
        return
    with pytest.raises(ArtifactError) as caught:
        check_fit(manifest, kind="eagle3", base="b" * 64, target=TARGET)
    assert caught.value.reason == reason


def test_one_target_in_two_formats_is_one_target() -> None:
    assert same_target("abc:fp16", "abc:int8")
    assert same_target("abc", "abc:int8")
    assert not same_target("abc:fp16", "abd:fp16")
