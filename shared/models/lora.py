"""Merging a LoRA artifact into a drafter: W += lora_alpha / rank * B A (Hu et al. 2021, arXiv:2106.09685, section 4.1).

Owns the tensor names: `<module path>.lora_A` [rank, in] and `<module path>.lora_B` [out, rank]. Everything is checked
before the first weight changes, so a refused adapter leaves the module as it was. The sum is formed in float32.
It knows nothing of peft or of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared.artifact import Artifact
from shared.errors import ArtifactError

A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"


@torch.no_grad()
def merge_lora(module: nn.Module, artifact: Artifact) -> None:
    """Adds the adapter to the linears of `module` in place. Raises ArtifactError (format or shape)."""
    scale = lora_scale(artifact.manifest.config)
    rank = int(artifact.manifest.config["rank"])
    pairs = lora_pairs(artifact.tensors)
    linears = {name: _linear(module, name) for name in pairs}
    for name, (a, b) in pairs.items():
        out_features, in_features = linears[name].weight.shape
        if a.shape != (rank, in_features) or b.shape != (out_features, rank):
            raise ArtifactError(
                "shape",
                f"{name}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit rank {rank} and weight "
                f"{(out_features, in_features)}",
            )
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ArtifactError("format", f"{name}: the adapter holds values that are not finite")
    for name, (a, b) in pairs.items():
        weight = linears[name].weight
        delta = scale * (b.to(weight.device).float() @ a.to(weight.device).float())  # [out, in]
        weight.copy_((weight.float() + delta).to(weight.dtype))


def lora_scale(config: Mapping[str, Any]) -> float:
    """What B A is multiplied by. Raises ArtifactError (format) unless rank and lora_alpha are positive numbers."""
    try:
        rank, lora_alpha = int(config["rank"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("format", f"the manifest's config is not a LoRA's: {error!r}") from error
    if rank < 1 or not 0 < lora_alpha < float("inf"):
        raise ArtifactError("format", f"rank {rank} and lora_alpha {lora_alpha} must be positive")
    return lora_alpha / rank


def lora_pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) by module path. Raises ArtifactError (shape) for a lone or an unknown tensor, or for none at all."""
    names = {name.removesuffix(suffix) for suffix in (A_SUFFIX, B_SUFFIX) for name in tensors if name.endswith(suffix)}
    expected = {name + suffix for name in names for suffix in (A_SUFFIX, B_SUFFIX)}
    if set(tensors) != expected or not names:
        raise ArtifactError(
            "shape",
            f"a LoRA artifact holds pairs: missing {sorted(expected - set(tensors))}, "
            f"unknown {sorted(set(tensors) - expected)}, {len(names)} pairs",
        )
    return {name: (tensors[name + A_SUFFIX], tensors[name + B_SUFFIX]) for name in sorted(names)}


def _linear(module: nn.Module, name: str) -> nn.Linear:
    try:
        found = module.get_submodule(name)
    except AttributeError as error:
        raise ArtifactError("shape", f"the drafter has no module {name}") from error
    if not isinstance(found, nn.Linear):
        raise ArtifactError("shape", f"{name} is a {type(found).__name__}, not a linear with a weight to merge into")
    return found
