"""What an attempt trains: an adapter or all weights, continued from the parent either way."""

from __future__ import annotations

import pytest
import torch

from learner.bank import DrafterBank
from learner.base import Base, load_base
from learner.tuning import FullTuning, LoraTuning, Tuning, install
from learner.unroll import Drafter
from shared.artifact import Artifact, Manifest
from shared.config import LearnerConfig
from shared.errors import ArtifactError
from tests.learner.traffic import TinyServing

TUNINGS: dict[str, Tuning] = {"lora": LoraTuning(LearnerConfig(lora_rank=4, lora_alpha=8)), "full": FullTuning()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    found = load_base(TinyServing(tmp_path_factory.mktemp("serving")).config)
    assert found is not None
    return found


def trained(tuning: Tuning, base: Base, parent: Artifact | None = None) -> tuple[Drafter, Artifact]:
    """Every trainable weight is pushed a little, as training would."""
    candidate = tuning.candidate(base, parent, seed=1)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in candidate.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    manifest = Manifest(version="v1", kind=base.kind, form="lora", target=base.target, base=base.hash)
    return candidate, tuning.export(candidate, manifest)


def outputs(drafter: Drafter) -> torch.Tensor:
    hidden = torch.linspace(-1, 1, drafter.config.hidden)
    return drafter.logits(drafter.fuse(torch.linspace(-1, 1, drafter.fc.in_features)) + hidden)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("name", TUNINGS)
def test_a_candidate_begins_as_its_parent_and_what_is_installed_is_what_was_trained(name: str, base: Base) -> None:
    tuning = TUNINGS[name]
    assert torch.equal(outputs(tuning.candidate(base, None, seed=1)), outputs(base.module))
    candidate, artifact = trained(tuning, base)
    assert artifact.manifest.form == name
    assert not torch.allclose(outputs(candidate), outputs(base.module), atol=1e-2)
    torch.testing.assert_close(outputs(tuning.candidate(base, artifact, seed=2)), outputs(candidate))
    installed = DrafterBank(base, {"v1": artifact}.get).get("v1")
    assert installed is not None
    torch.testing.assert_close(outputs(installed), outputs(candidate))
    assert not any(parameter.requires_grad for parameter in installed.parameters())


def test_all_weights_are_trained_or_only_the_adapter(base: Base) -> None:
    full, lora = (TUNINGS[name].candidate(base, None, seed=1) for name in ("full", "lora"))
    assert all(parameter.requires_grad for parameter in full.parameters())
    assert {name.split(".")[-3] for name, p in lora.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    # What candidates do to their weights is nothing to the base.
    assert not any(parameter.requires_grad for parameter in base.module.parameters())


def test_weights_of_another_shape_are_refused(base: Base) -> None:
    _, artifact = trained(TUNINGS["full"], base)
    torn = Artifact(artifact.manifest, {name: t for name, t in artifact.tensors.items() if name != "fc.weight"})
    with pytest.raises(ArtifactError, match="do not fit the drafter"):
        install(base.copy(), torn)


def test_an_export_does_not_change_when_training_goes_on(base: Base) -> None:
    candidate, artifact = trained(TUNINGS["full"], base)
    before = artifact.tensors["fc.weight"].clone()
    with torch.no_grad():
        candidate.fc.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(artifact.tensors["fc.weight"], before)
