"""Which base drafter goes with a target: the shipped head, a head in a folder, another language model, or none.

Serving and learner ask the same function, so both start from the same base and name it by the same hash. A head that
was made for another target is never taken, whoever asked for it. Nothing is loaded here.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.artifact import MANIFEST_FILE, WEIGHTS_FILE, Manifest, hash_blob, read_manifest, same_target
from shared.config import Config
from shared.errors import ArtifactError, ConfigError
from shared.models.fingerprint import checkpoint_fingerprint
from shared.models.target import resolve_model

SHIPPED = Path(__file__).parent / "drafter_weights"  # one folder a target
_FIELD = "drafter.model"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseDrafter:
    """What replicas start with and every adapter is relative to."""

    kind: Literal["eagle3", "model", "none"]
    folder: Path | None = None  # of an eagle3 head's artifact
    spec: str = ""  # of a model: what `load_model` takes


NO_DRAFTER = BaseDrafter("none")


def resolve_base(config: Config, target_name: str, fingerprint: str, *, shipped: Path = SHIPPED) -> BaseDrafter:
    """The base drafter of `config.drafter` for the target with this fingerprint.

    Raises ConfigError for a drafter that was asked for and is not there, or does not fit kind or target. Without an
    explicit wish a target that nothing is shipped for is served plainly, which is logged.
    """
    kind, model = config.drafter.kind, config.drafter.model
    if kind == "none":
        return NO_DRAFTER
    if model == "default":
        return _shipped(kind, target_name, fingerprint, shipped)
    folder = Path(model).expanduser()
    if (folder / MANIFEST_FILE).is_file():
        _check_head(kind, folder, target_name, fingerprint)
        return BaseDrafter("eagle3", folder)
    if kind == "eagle3":
        raise ConfigError(
            _FIELD, f"{model} is no folder with a {MANIFEST_FILE}", "Make one with `redraft train-drafter`."
        )
    return BaseDrafter("model", spec=model)


def base_hash(base: BaseDrafter, home: Path) -> str:
    """What adapters name as their base: the blob's hash of a head, the checkpoint's fingerprint of a language model."""
    if base.folder is not None:
        return hash_blob((base.folder / WEIGHTS_FILE).read_bytes())
    return checkpoint_fingerprint(resolve_model(base.spec, home, field=_FIELD), home, _FIELD) if base.spec else ""


def _shipped(kind: str, target_name: str, fingerprint: str, shipped: Path) -> BaseDrafter:
    if kind == "model":
        raise ConfigError(_FIELD, "no language model is shipped as a drafter", "Name a folder or a hub model.")
    # By fingerprint and not by name: the same weights may be called by alias, folder or hub name.
    for folder in sorted(shipped.glob("*/")):
        if (folder / MANIFEST_FILE).is_file() and same_target(_manifest(folder).target, fingerprint):
            return BaseDrafter("eagle3", folder)
    if kind == "eagle3":
        raise ConfigError(
            _FIELD,
            f"no head is shipped for {target_name}",
            "Make one with `redraft train-drafter` and name its folder, or set drafter.kind to none.",
        )
    log.warning("no drafter is shipped for %s: serving without speculation (set drafter.model)", target_name)
    return NO_DRAFTER


def _check_head(kind: str, folder: Path, target_name: str, fingerprint: str) -> None:
    if kind == "model":
        raise ConfigError("drafter.kind", f"{folder} holds an eagle3 head, not a model", "Set drafter.kind to auto.")
    if not same_target(_manifest(folder).target, fingerprint):
        raise ConfigError(
            _FIELD,
            f"the head in {folder} was made for another target than {target_name}",
            "Serve that target, or train a head for this one.",
        )


def _manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, ArtifactError) as error:
        raise ConfigError(_FIELD, f"the manifest in {folder} cannot be read ({error})", "Fetch it again.") from error
