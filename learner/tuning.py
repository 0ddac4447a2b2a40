"""What an attempt trains of a drafter, and how the result becomes an artifact: an adapter, or all weights.

A learner in service trains adapters. All weights are for comparing: replicas take such an artifact as a base only.
Either continues its parent, and stands by itself. It knows nothing of data, settings of training or decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from learner.base import Base
from learner.lora import LoraSettings, add_lora, export_lora
from learner.unroll import Drafter
from shared.artifact import Artifact, Manifest
from shared.config import LearnerConfig
from shared.errors import ArtifactError
from shared.models.eagle3 import Eagle3Head
from shared.models.lora import merge_lora


class Tuning(Protocol):
    def candidate(self, base: Base, parent: Artifact | None, seed: int) -> Drafter:
        """A copy that computes what the parent does (None: the base); what is to be trained requires a gradient."""

    def export(self, candidate: Drafter, manifest: Manifest) -> Artifact:
        """The trained candidate, `manifest` with form and config filled in."""


@dataclass(frozen=True)
class LoraTuning:
    """Raises ConfigError for unknown learner.lora_targets."""

    learner: LearnerConfig

    def candidate(self, base: Base, parent: Artifact | None, seed: int) -> Drafter:
        drafter = base.copy()
        try:
            add_lora(drafter, self._settings(seed), parent)
        except ArtifactError:
            # The settings have changed since: a parent of another shape cannot be continued, the base always can.
            drafter = base.copy()
            add_lora(drafter, self._settings(seed))
        return drafter

    def export(self, candidate: Drafter, manifest: Manifest) -> Artifact:
        return export_lora(candidate, self._settings(0), manifest)

    def _settings(self, seed: int) -> LoraSettings:
        return LoraSettings(self.learner.lora_rank, self.learner.lora_alpha, self.learner.lora_targets, seed=seed)


class FullTuning:
    """All weights but the token embedding, which is the target's."""

    def candidate(self, base: Base, parent: Artifact | None, seed: int) -> Drafter:
        drafter = base.copy()
        if parent is not None:
            install(drafter, parent)
        return drafter.requires_grad_(True)

    def export(self, candidate: Drafter, manifest: Manifest) -> Artifact:
        config = candidate.config.to_dict() if isinstance(candidate, Eagle3Head) else {}
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in candidate.state_dict().items()}
        return Artifact(replace(manifest, form="full", config=config), tensors)


def install(drafter: Drafter, artifact: Artifact) -> None:
    """Makes a copy of the base compute what the artifact says, in place. Raises ArtifactError (format or shape)."""
    if artifact.manifest.form == "lora":
        merge_lora(drafter, artifact)
        return
    try:
        drafter.load_state_dict(dict(artifact.tensors))
    except RuntimeError as error:
        raise ArtifactError("shape", f"the weights do not fit the drafter: {error}") from error
