"""Finds and loads a causal language model: alias, folder or hub name in, a `LoadedModel` ready to serve out.

Invariant: what is returned is in eval mode, takes no gradient, and computes in the weight format that its
fingerprint names. Code from a checkpoint is never executed. It knows nothing of the engine or of drafters.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from shared.errors import ConfigError
from shared.models import smollm2
from shared.models.fingerprint import checkpoint_fingerprint, weight_files
from shared.models.linears import WeightKind, pack_linears, packing_supported
from shared.models.quiet import quiet_transformers
from shared.models.support import check_supported, usable_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_KINDS = ("auto", "fp16", "int8", "fp32", "bf16")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model and what the rest of the system must know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str  # 64 hex digits of architecture and weights, a colon, the weight format
    weights: str  # fp16, int8, fp32 or bf16: what is computed with, after any fall-back
    device: torch.device
    vocab_size: int  # rows of the logits
    token_count: int  # ids from here on are padding: no tokenizer output, to be masked in the logits
    eos_token_ids: frozenset[int]
    max_positions: int


def load_model(
    spec: str, *, home: Path, device: str = "auto", weights: str = "auto", field: str = "target"
) -> LoadedModel:
    """Load `spec` for serving; ConfigError (naming `field`, device or weights) if that cannot be done exactly.

    weights "auto" is fp16 on x86 CPUs, bf16 on CUDA and fp32 elsewhere.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = resolve_device(device)
    kind = resolve_weights(weights, place)
    folder = resolve_model(spec, home, field=field)
    config = _read_config(folder, field)
    check_supported(config, field)
    positions = usable_positions(config, field)
    fingerprint = f"{checkpoint_fingerprint(folder, home, field)}:{kind}"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32 if place.type == "cpu" else dtype,  # packing rounds from fp32, once
                use_safetensors=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ConfigError(field, f"{folder} cannot be loaded ({error})", "Check the checkpoint") from error
    model.eval().requires_grad_(False)
    vocab_size = _vocab_size(model)  # before packing, which leaves no weight to look at
    if place.type == "cpu":
        pack_model(model, cast(WeightKind, kind))
    token_count = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    if token_count > vocab_size:
        raise ConfigError(
            field,
            f"its tokenizer has {token_count} tokens, but the model only {vocab_size} logits",
            "Use the tokenizer that the model was trained with",
        )
    return LoadedModel(
        model=model.to(place),
        tokenizer=tokenizer,
        name=_name(spec),
        fingerprint=fingerprint,
        weights=kind,
        device=place,
        vocab_size=vocab_size,
        token_count=token_count,
        eos_token_ids=_eos_token_ids(model, tokenizer, token_count),
        max_positions=positions,
    )


def pack_model(model: PreTrainedModel, weights: WeightKind) -> None:
    """Puts the linears of a model on the CPU into their weight format, fused first where the fast forward fits.

    fp32 stays as it is, so that it can be trained; `PagedModel` fuses it when it is served.
    """
    if weights == "fp32":
        return
    from shared.models.twin import fuse  # and with it transformers

    fuse(model)
    pack_linears(model, weights)


def resolve_model(spec: str, home: Path, *, field: str = "target") -> Path:
    """The folder of `spec`: the built-in alias (converted on first use), a folder, or a hub name."""
    if spec.lower() == smollm2.ALIAS:
        return smollm2.smollm2_folder(home)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(field, f"{folder} holds no config.json", "Name a folder made by save_pretrained")
        return folder
    if is_path(spec):
        raise ConfigError(field, f"there is no folder {spec}", "Check the path")
    return _from_hub(spec, field)


def is_path(spec: str) -> bool:
    """Whether it can only be meant as a place on disk: a hub name is `name` or `owner/name`."""
    return spec.startswith((".", "/", "~")) or spec.endswith(".json") or spec.count("/") > 1


def resolve_device(device: str) -> torch.device:
    """auto takes a CUDA device if there is one; ConfigError for one that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", f"{device!r} is no device", "Use auto, cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{device!r} is not supported", "Use auto, cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"{device!r} is not on this machine", "Use cpu, or install torch with CUDA")
    return place


def resolve_weights(weights: str, device: torch.device) -> str:
    """The weight format for a device; packed formats fall back to fp32 (logged) where they do not work."""
    if weights not in _KINDS:
        raise ConfigError("weights", f"{weights!r} is no weight format", f"Use one of {', '.join(_KINDS)}")
    if device.type == "cuda":
        if weights == "int8":
            raise ConfigError("weights", "int8 is a CPU format", "Use bf16 on CUDA")
        return "bf16" if weights == "auto" else weights
    # Not bf16, where AMX makes many rows cheaper: it rounds every output to 8 bits, fp16 only the weights to 11.
    kind = cast(WeightKind, "fp16" if weights == "auto" else weights)
    if kind != "fp32" and not packing_supported(kind):
        log.warning("this CPU has no packed %s linear layers: serving in fp32, at more cost per token", kind)
        return "fp32"
    return kind


def _from_hub(spec: str, field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(spec, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError as error:
        raise ConfigError(field, f"{spec} is gated", "Accept its terms on the hub and log in there") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        remedy = f"Use {smollm2.ALIAS}, a folder, or an existing hub name"
        raise ConfigError(field, f"{spec!r} is neither a folder nor a model on the hub", remedy) from error
    except (LocalEntryNotFoundError, OSError) as error:
        remedy = f"Go online, name a folder, or use the built-in {smollm2.ALIAS}"
        raise ConfigError(field, f"{spec!r} is no folder here, and the hub cannot be reached", remedy) from error
    weight_files(folder, field)
    return folder


def _read_config(folder: Path, field: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config
    except (OSError, ValueError, KeyError) as error:
        remedy = "Use a model that this version of transformers knows without code of its own"
        try:
            kind = json.loads((folder / "config.json").read_text()).get("model_type")
        except (OSError, ValueError):
            kind = None
        raise ConfigError(field, f"the config in {folder} (model_type {kind}) cannot be read", remedy) from error


def _name(spec: str) -> str:
    folder = Path(spec).expanduser()
    return folder.resolve().name if folder.is_dir() and spec.lower() != smollm2.ALIAS else spec


def _vocab_size(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _eos_token_ids(model: Any, tokenizer: Any, token_count: int) -> frozenset[int]:
    """Every id that any of the three sources calls the end; chat models name several."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    known = frozenset(token for token in ids if 0 <= token < token_count)
    if not known:
        log.warning("the model names no end-of-sequence token: only limits and stop strings end a request")
    return known
