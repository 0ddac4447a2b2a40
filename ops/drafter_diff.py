"""How far apart two adapters are, linear by linear, in what they add to the base's weights."""

from __future__ import annotations

from torch import Tensor

from shared.artifact import Artifact
from shared.models.lora import lora_scale


def weight_changes(before: Artifact | None, after: Artifact | None) -> list[tuple[str, float]]:
    """(linear, norm of the difference over the norm of `before`), largest first. None stands for the base, which adds
    nothing: where `before` adds nothing, the norm itself is given."""
    old, new = _added(before), _added(after)
    found = []
    for name in old.keys() | new.keys():
        sides = [side[name] for side in (new, old) if name in side]
        difference = sides[0] - sides[1] if len(sides) == 2 else sides[0]
        own = float(old[name].norm()) if name in old else 0.0
        found.append((name, float(difference.norm()) / (own or 1.0)))
    return sorted(found, key=lambda item: (-item[1], item[0]))


def _added(artifact: Artifact | None) -> dict[str, Tensor]:
    """linear -> [out, in] that the adapter adds."""
    if artifact is None:
        return {}
    scale, tensors = lora_scale(artifact.manifest.config), artifact.tensors
    names = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    return {name: scale * tensors[f"{name}.lora_B"].float() @ tensors[f"{name}.lora_A"].float() for name in names}
