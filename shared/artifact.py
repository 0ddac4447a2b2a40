"""A drafter artifact: a manifest and tensors in one safetensors blob, or in a folder of two files.

An adapter (`form: lora`) is relative to one immutable base, named by hash; a base (`form: full`) stands by itself.
`open_blob` refuses what is torn or is not what its hash says before any tensor is looked at. Which target and which
base a replica accepts is the replica's decision, made with `check_fit`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from shared.errors import ArtifactError

FORMAT = "redraft-drafter/1"
# Manifest field -> its type, where that is not text.
_KINDS: dict[str, Any] = {"created_at": int | float, "config": Mapping, "metrics": Mapping, "origin": Mapping}
WEIGHTS_FILE, MANIFEST_FILE = "drafter.safetensors", "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a drafter version is. `base` is the base's hash (empty for a base itself)."""

    version: str  # "base" or "v1", "v2", ...
    kind: Literal["eagle3", "model"]
    form: Literal["full", "lora"]
    target: str  # fingerprint of the target it drafts for, weight format apart: see `same_target`
    base: str = ""
    parent: str = ""
    created_at: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)  # shape of the module (Eagle3Config), or LoRA settings
    metrics: Mapping[str, Any] = field(default_factory=dict)  # how it was judged
    origin: Mapping[str, Any] = field(default_factory=dict)  # command, seed, data hash, trace window
    format: str = FORMAT


@dataclass(frozen=True)
class Artifact:
    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]


def pack_blob(artifact: Artifact) -> bytes:
    """One self-contained safetensors file, the manifest in its header."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in artifact.tensors.items()}
    return save_tensors(tensors, metadata={"manifest": json.dumps(asdict(artifact.manifest), sort_keys=True)})


def hash_blob(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def open_blob(blob: bytes, expected_hash: str | None = None) -> Artifact:
    """Raises ArtifactError (reason hash, truncated or format)."""
    if expected_hash is not None and hash_blob(blob) != expected_hash:
        raise ArtifactError(
            "hash", f"the blob's sha256 is {hash_blob(blob)[:12]}…, the pointer says {expected_hash[:12]}…"
        )
    if len(blob) < 8 or len(blob) < 8 + int.from_bytes(blob[:8], "little"):
        raise ArtifactError("truncated", f"the blob ends inside its header ({len(blob)} bytes)")
    try:
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        manifest = read_manifest(json.loads(header["__metadata__"]["manifest"]))
        tensors = load_tensors(blob)
    except SafetensorError as error:
        raise ArtifactError("truncated", f"the blob is not whole: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError("format", f"the blob has no readable manifest: {error}") from error
    return Artifact(manifest, tensors)


def read_manifest(tree: Any) -> Manifest:
    """Raises ArtifactError (reason format) for another format, unknown or missing keys, or values of another type."""
    if not isinstance(tree, Mapping) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, Mapping) else tree
        raise ArtifactError("format", f"format {found!r}; this release reads {FORMAT}")
    unknown = set(tree) - {f.name for f in fields(Manifest)}
    if unknown:
        raise ArtifactError("format", f"unknown manifest keys {sorted(unknown)}")
    for name, value in tree.items():
        kind = _KINDS.get(name, str)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ArtifactError("format", f"the manifest's {name} is {value!r}")
    try:
        return Manifest(**tree)
    except TypeError as error:
        raise ArtifactError("format", f"incomplete manifest: {error}") from error


def save_folder(artifact: Artifact, folder: Path) -> None:
    """Weights and a readable manifest as two files; the blob of the folder is what `load_folder` hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).write_bytes(pack_blob(artifact))
    text = json.dumps(asdict(artifact.manifest), indent=2, sort_keys=True)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def load_folder(folder: Path) -> tuple[Artifact, str]:
    """The artifact and its blob hash (what adapters name as `base`). Raises ArtifactError."""
    try:
        blob = (folder / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise ArtifactError("format", f"{folder} holds no {WEIGHTS_FILE}: {error.strerror}") from error
    return open_blob(blob), hash_blob(blob)


def same_target(left: str, right: str) -> bool:
    """Fingerprints name weights and weight format (`<hash>:<format>`); a drafter fits every format of one target."""
    return left.partition(":")[0] == right.partition(":")[0]


def check_fit(manifest: Manifest, *, kind: str, base: str, target: str) -> None:
    """Raises ArtifactError (kind, base or target) unless this adapter belongs on this base and target."""
    if manifest.kind != kind or manifest.form != "lora":
        raise ArtifactError(
            "kind", f"a {manifest.form} {manifest.kind} artifact cannot be swapped into a {kind} drafter"
        )
    if manifest.base != base:
        raise ArtifactError("base", f"it was trained on base {manifest.base[:12]}…, this replica serves {base[:12]}…")
    if not same_target(manifest.target, target):
        raise ArtifactError(
            "target", f"it drafts for target {manifest.target[:12]}…, this replica serves {target[:12]}…"
        )
