"""Builds a replica's drafter from the configuration, and packed copies of later versions beside the one that serves.

Owns the immutable base. A version is always base plus one adapter, merged in fp32 and then packed; what is built here
touches nothing that is serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import Tensor

from serving.drafters.base import Drafter
from serving.drafters.eagle3 import Eagle3Drafter
from serving.drafters.model import ModelDrafter, check_same_tokens
from shared.artifact import Artifact, check_fit, load_folder
from shared.config import Config
from shared.drafters import resolve_base
from shared.models.eagle3 import head_from_artifact
from shared.models.eagle3_served import ServedHead
from shared.models.huge_pages import use_huge_pages
from shared.models.linears import WeightKind
from shared.models.lora import merge_lora
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel, load_model, pack_model

BASE_VERSION = "base"
Swap = Callable[[], None]  # cheap; run between two rounds


@dataclass(frozen=True)
class DrafterSlot:
    """The drafter that serves, and how to prepare another version for its place."""

    drafter: Drafter
    kind: str
    base: str  # hash that adapters name
    target: str  # fingerprint
    prepare: Callable[[Artifact | None, str], Swap]  # (adapter or None for the base, version); the slow part

    def check(self, artifact: Artifact) -> None:
        """Raises ArtifactError unless this adapter belongs here."""
        check_fit(artifact.manifest, kind=self.kind, base=self.base, target=self.target)


def load_drafter(config: Config, target: LoadedModel, kv: PagedKV) -> DrafterSlot | None:
    """The configured drafter at its base version, or None. Raises ConfigError or ArtifactError.

    `kv` tells the blocks that the drafter's own pools must mirror.
    """
    base = resolve_base(config, target.name, target.fingerprint)
    if base.kind == "none":
        return None
    own = PagedKV(kv.num_blocks, kv.block_size)
    if base.kind == "eagle3":
        assert base.folder is not None, "an EAGLE-3 base is a folder"
        slot = _eagle3(base.folder, target, own)
    else:
        slot = _model(base.spec, config, target, own)
    return _on_huge_pages(slot) if target.device.type == "cpu" else slot


def _on_huge_pages(slot: DrafterSlot) -> DrafterSlot:
    """Versions that come later lie as the first one does, which `assemble` sees to."""

    def prepare(artifact: Artifact | None, version: str) -> Swap:
        swap = slot.prepare(artifact, version)
        use_huge_pages()
        return swap

    return replace(slot, prepare=prepare)


def _eagle3(folder: Path, target: LoadedModel, kv: PagedKV) -> DrafterSlot:
    base, digest = load_folder(folder)
    embedding: Tensor = target.model.get_input_embeddings().weight  # type: ignore[assignment]

    def build(artifact: Artifact | None) -> ServedHead:
        head = head_from_artifact(base, embedding)
        if artifact is not None:
            merge_lora(head, artifact)
        if target.device.type == "cpu":
            return ServedHead(head, embedding, cast(WeightKind, target.weights))
        return ServedHead(head.to(target.device, embedding.dtype), embedding)

    drafter = Eagle3Drafter(build(None), BASE_VERSION, kv, vocab_size=target.vocab_size, device=target.device)

    def prepare(artifact: Artifact | None, version: str) -> Swap:
        head = build(artifact)
        return lambda: drafter.swap(head, version)

    return DrafterSlot(drafter, "eagle3", digest, target.fingerprint, prepare)


def _model(spec: str, config: Config, target: LoadedModel, kv: PagedKV) -> DrafterSlot:
    def load(weights: str) -> LoadedModel:
        return load_model(
            spec, home=config.home_path, device=str(target.device), weights=weights, field="drafter.model"
        )

    loaded = load(target.weights)
    check_same_tokens(target, loaded)
    drafter = ModelDrafter(PagedModel(loaded, kv), BASE_VERSION, vocab_size=target.vocab_size)

    def prepare(artifact: Artifact | None, version: str) -> Swap:
        on_cpu = target.device.type == "cpu"
        copy = load("fp32" if artifact is not None and on_cpu else target.weights)
        if artifact is not None:
            merge_lora(copy.model, artifact)
            if on_cpu:
                pack_model(copy.model, cast(WeightKind, target.weights))
        model = PagedModel(copy, kv)
        return lambda: drafter.swap(model, version)

    digest = loaded.fingerprint.partition(":")[0]
    return DrafterSlot(drafter, "model", digest, target.fingerprint, prepare)
