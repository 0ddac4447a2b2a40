"""The learner's own copy of the base drafter, unpacked in float32: what is trained from, merged into and judged by.

Found by the same function as serving's, and named by the same hash. A head needs the target's token embedding and
nothing else of it, so only that tensor is read from the checkpoint. The module itself is never changed: ask for copies.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from learner.unroll import Drafter
from shared.artifact import load_folder
from shared.config import Config
from shared.drafters import base_hash, resolve_base
from shared.models.eagle3 import Eagle3Head, head_from_artifact
from shared.models.fingerprint import checkpoint_fingerprint, weight_files
from shared.models.target import load_model, resolve_device, resolve_model

BASE_VERSION = "base"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    kind: Literal["eagle3", "model"]
    hash: str  # what adapters name as their base
    target: str  # fingerprint
    vocab: int  # token ids in traces are below this
    token_count: int  # of a language model: ids from here on are padding; 0 for a head
    feature_layers: tuple[int, ...]  # empty: it drafts without features
    feature_width: int
    module: Drafter  # frozen, in eval mode
    embedding: Tensor | None  # [vocab, target_hidden] of a head, shared by all copies

    def copy(self) -> Drafter:
        """A module of its own with the base's weights."""
        if isinstance(self.module, Eagle3Head) and self.embedding is not None:
            head = Eagle3Head(self.module.config, self.embedding).to(self.embedding.device)
            head.load_state_dict(self.module.state_dict())
            return head.eval().requires_grad_(False)
        return copy.deepcopy(self.module)


def target_of(config: Config) -> tuple[Path, str]:
    """The target's folder and fingerprint. The learner has no weight format of the target of its own."""
    folder = resolve_model(config.target.model, config.home_path)
    return folder, f"{checkpoint_fingerprint(folder, config.home_path)}:{config.target.dtype}"


def load_base(config: Config) -> Base | None:
    """None where nothing drafts. Raises ConfigError or ArtifactError."""
    folder, fingerprint = target_of(config)
    found = resolve_base(config, config.target.model, fingerprint)
    if found.kind == "none":
        return None
    digest, device = base_hash(found, config.home_path), resolve_device(config.learner.device)
    if found.folder is not None:
        embedding = input_embedding(folder).to(device)
        head = head_from_artifact(load_folder(found.folder)[0], embedding).to(device)
        layers = head.config.feature_layers
        width = len(layers) * head.config.target_hidden
        return Base("eagle3", digest, fingerprint, len(embedding), 0, layers, width, head, embedding)
    loaded = load_model(
        found.spec, home=config.home_path, device=config.learner.device, weights="fp32", field="drafter.model"
    )
    model = cast(Drafter, loaded.model)
    return Base("model", digest, fingerprint, loaded.vocab_size, loaded.token_count, (), 0, model, None)


def input_embedding(folder: Path) -> Tensor:  # [vocab, hidden] float32
    """The token embedding of the checkpoint in `folder`."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    weight = skeleton.get_input_embeddings().weight
    name = next(name for name, parameter in skeleton.named_parameters() if parameter is weight)
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 - not a mapping
                    found: Tensor = file.get_tensor(name).float()
                    return found
        except (SafetensorError, OSError) as error:
            log.warning("%s cannot be searched for %s: %s", path, name, error)
    # Some checkpoints name their tensors otherwise, and transformers knows how.
    model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    embedding: Tensor = model.get_input_embeddings().weight.detach().clone()
    return embedding
