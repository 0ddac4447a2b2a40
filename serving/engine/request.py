"""A request as accepted: prompt, parameters, tags. Immutable; what changes while it runs is in `sequence.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.trace import Sampling


@dataclass(frozen=True)
class GenerationParams:
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None  # given: shared-noise coupling; None: rejection sampling
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculative: bool = True


@dataclass(frozen=True)
class GenerationRequest:
    id: str
    prompt_ids: tuple[int, ...]
    params: GenerationParams = field(default_factory=GenerationParams)
    domain: str = "default"
    tenant: str = "default"
