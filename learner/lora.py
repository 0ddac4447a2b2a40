"""LoRA on a drafter's linears through peft: put in, continued from a parent, taken out as an artifact.

An adapter is always relative to the drafter's base weights, so a child starts from its parent's A and B and its export
stands by itself. peft's module and tensor names stay inside this module; the exported ones are those of
`shared.models.lora`, which merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from learner.unroll import Drafter
from shared.artifact import Artifact, Manifest
from shared.errors import ArtifactError, ConfigError
from shared.models.lora import A_SUFFIX, B_SUFFIX, lora_pairs, lora_scale

_ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    rank: int = 16
    lora_alpha: int = 32
    targets: tuple[str, ...] = ()  # last parts of module paths; empty: every linear of the drafter
    seed: int = 0  # of A; B starts at zero


def add_lora(drafter: Drafter, settings: LoraSettings, parent: Artifact | None = None) -> None:
    """Puts trainable A and B beside the drafter's linears, in place; nothing else requires a gradient after.

    Raises ConfigError for a target that no linear is called, ArtifactError (shape or format) for a parent of another
    rank, scale or set of linears: training cannot continue from it, start from the base instead.
    """
    paths = lora_targets(drafter, settings.targets)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.lora_alpha, target_modules=paths, lora_dropout=0.0, bias="none"
    )
    drafter.requires_grad_(False)
    with torch.random.fork_rng():  # A is drawn from the global generator
        torch.manual_seed(settings.seed)
        inject_adapter_in_model(config, drafter, adapter_name=_ADAPTER)
    if parent is not None:
        _load(drafter, settings, parent)


def lora_targets(drafter: nn.Module, names: Sequence[str]) -> list[str]:
    """Paths of the linears to adapt. One tied to the token embedding is never among them: it would change both."""
    tied = _tied_weights(drafter)
    paths = [
        path for path, module in drafter.named_modules() if type(module) is nn.Linear and id(module.weight) not in tied
    ]
    chosen = [path for path in paths if not names or path in names or path.rpartition(".")[2] in names]
    known = {part for path in paths for part in (path, path.rpartition(".")[2])}
    if unknown := sorted(set(names) - known):
        raise ConfigError(
            "learner.lora_targets",
            f"the drafter has no trainable linear called {', '.join(unknown)}",
            f"Choose from {', '.join(sorted({path.rpartition('.')[2] for path in paths}))}, or leave it empty.",
        )
    return chosen


def export_lora(drafter: Drafter, settings: LoraSettings, manifest: Manifest) -> Artifact:
    """The adapter as an artifact: `manifest` with form and config filled in. float32, so that training can go on."""
    tensors = {}
    for path, (a, b) in _adapters(drafter).items():
        tensors[path + A_SUFFIX] = a.detach().float().cpu().clone()
        tensors[path + B_SUFFIX] = b.detach().float().cpu().clone()
    return Artifact(replace(manifest, form="lora", config=_config(settings)), tensors)


def _config(settings: LoraSettings) -> dict[str, Any]:
    return {"rank": settings.rank, "lora_alpha": settings.lora_alpha, "targets": list(settings.targets)}


def _adapters(drafter: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The live A [rank, in] and B [out, rank] by path of the linear beside which they stand."""
    return {
        path: (
            module.get_submodule(f"lora_A.{_ADAPTER}").get_parameter("weight"),
            module.get_submodule(f"lora_B.{_ADAPTER}").get_parameter("weight"),
        )
        for path, module in drafter.named_modules()
        if isinstance(module, LoraLinear)
    }


@torch.no_grad()
def _load(drafter: nn.Module, settings: LoraSettings, parent: Artifact) -> None:
    pairs, live = lora_pairs(parent.tensors), _adapters(drafter)
    if set(pairs) != set(live):
        raise ArtifactError(
            "shape",
            f"the parent {parent.manifest.version} adapts other linears: {sorted(set(pairs) ^ set(live))}",
        )
    if lora_scale(parent.manifest.config) != settings.lora_alpha / settings.rank:
        raise ArtifactError(
            "shape",
            f"the parent {parent.manifest.version} has lora_alpha / rank {lora_scale(parent.manifest.config)}, "
            f"the settings say {settings.lora_alpha / settings.rank}",
        )
    for path, (a, b) in pairs.items():
        live_a, live_b = live[path]
        if (a.shape, b.shape) != (live_a.shape, live_b.shape):
            raise ArtifactError("shape", f"{path}: the parent has rank {a.shape[0]}, the settings say {settings.rank}")
        live_a.copy_(a)
        live_b.copy_(b)


def _tied_weights(drafter: nn.Module) -> set[int]:
    return {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Embedding)}
