"""The configuration that a contender of ours runs with, and the head that is of no use.

The useless head is the shipped or given one with the rows of its output layer shuffled: it costs exactly what the
good one costs and drafts nonsense, which is what gamma auto must see.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ops.bench_line_up import USELESS, Contender
from shared.config import Config, DrafterConfig
from shared.errors import ConfigError

_OUTPUT = "lm_head.weight"


def own_config(contender: Contender, config: Config, folder: Path) -> Config:
    """`folder` is where a useless head may be written."""
    target = replace(config.target, dtype=contender.dtype)  # type: ignore[arg-type]
    if not contender.drafts:
        return replace(config, target=target, drafter=DrafterConfig(kind="none", gamma=0))
    drafter = config.drafter
    if contender.gamma == "auto":
        drafter = replace(drafter, gamma="auto")
    else:
        gamma = int(contender.gamma)
        drafter = replace(drafter, gamma=gamma, gamma_max=max(drafter.gamma_max, gamma))
    if contender.drafter == USELESS:
        drafter = replace(drafter, kind="eagle3", model=str(shuffled_head(config, folder)))
    return replace(config, target=target, drafter=drafter)


def shuffled_head(config: Config, folder: Path) -> Path:
    """Raises ConfigError where the configured drafter is no head."""
    import torch

    from shared.artifact import Artifact, load_folder, save_folder
    from shared.drafters import resolve_base
    from shared.models.fingerprint import checkpoint_fingerprint
    from shared.models.target import resolve_model

    target = resolve_model(config.target.model, config.home_path)
    fingerprint = checkpoint_fingerprint(target, config.home_path, "target.model")
    base = resolve_base(config, config.target.model, fingerprint)
    if base.folder is None:
        raise ConfigError("--contenders", f"{USELESS} needs a head to shuffle", "Name one with --drafter.")
    artifact, _ = load_folder(base.folder)
    rows = artifact.tensors[_OUTPUT]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    save_folder(Artifact(artifact.manifest, {**artifact.tensors, _OUTPUT: rows[order]}), folder)
    return folder
