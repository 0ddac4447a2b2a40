"""From a Config to the parts that an engine is made of: target, drafter slot, gamma controller, limits.

The one place where settings become an engine's parts, for a replica and for whoever measures one. It starts no thread
and opens no connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.drafters.base import Drafter
from serving.drafters.load import DrafterSlot, load_drafter
from serving.engine.calibrate import calibrate
from serving.engine.engine import Limits
from serving.spec.gamma import GammaController
from shared.config import Config
from shared.models.huge_pages import use_huge_pages
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel, load_model


@dataclass(frozen=True)
class Assembly:
    """What `Engine` takes, and the slot through which its drafter is exchanged."""

    loaded: LoadedModel
    paged: PagedModel
    slot: DrafterSlot | None
    controller: GammaController
    limits: Limits

    @property
    def drafter(self) -> Drafter | None:
        return self.slot.drafter if self.slot is not None else None


def assemble(config: Config) -> Assembly:
    """Loads the models; with gamma auto, times a few forwards. Raises ConfigError or ArtifactError."""
    target, engine = config.target, config.engine
    loaded = load_model(
        target.model, home=config.home_path, device=target.device, weights=target.dtype, field="target.model"
    )
    kv = PagedKV(-(-engine.kv_tokens // engine.block_size), engine.block_size)
    slot = load_drafter(config, loaded, kv)
    paged = PagedModel(loaded, kv, slot.drafter.feature_layers if slot is not None else ())
    gamma = config.drafter.gamma
    controller = GammaController(
        fixed=None if gamma == "auto" else int(gamma),
        most=config.drafter.gamma_max,
        exploration=config.drafter.exploration,
        cut=config.drafter.confidence_cut,
    )
    if loaded.device.type == "cpu":
        use_huge_pages()  # before costs are measured
    if gamma == "auto":
        calibrate(paged, controller, rows=engine.max_batch * (1 + config.drafter.gamma_max))
    context = min(engine.max_context or loaded.max_positions, loaded.max_positions, engine.kv_tokens)
    limits = Limits(context, engine.max_batch, engine.prefill_tokens, engine.prefix_cache)
    return Assembly(loaded, paged, slot, controller, limits)
