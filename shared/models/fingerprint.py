"""The identity of a checkpoint: a hash over the architecture and every weight on disk.

Independent of how tensors are spread over shards, of file names, and of settings that change no logit, so the
same weights have the same fingerprint on every machine. The digest is cached under `<home>/fingerprints`, keyed
by the files' sizes and times, because hashing gigabytes at every start would not be a start of seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

# Keys that shape the computation. A list of what counts, rather than of what does not: later versions of
# transformers write new keys, and a drafter must not be refused because of one.
_ARCHITECTURE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "hidden_act", "hidden_activation", "rms_norm_eps",
    "layer_norm_eps", "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "tie_word_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok",
    "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "layer_norm_epsilon", "partial_rotary_factor",
)  # fmt: skip

log = logging.getLogger(__name__)


def checkpoint_fingerprint(folder: Path, home: Path, field: str = "target") -> str:
    """64 hex digits for the safetensors checkpoint in `folder`; ConfigError(field) if there is none."""
    files = weight_files(folder, field)
    key = json.dumps([_stamp(path) for path in (folder / "config.json", *files)])
    cache = home / "fingerprints" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    try:
        cached = json.loads(cache.read_text())
        if cached["key"] == key:
            return str(cached["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = _digest(folder, files, field)
    _remember(cache, {"key": key, "digest": digest, "folder": str(folder)})
    return digest


def weight_files(folder: Path, field: str = "target") -> list[Path]:
    """The safetensors files that make up the checkpoint, sorted by name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [folder / "model.safetensors"]
    if missing := [path.name for path in files if not path.is_file()]:
        raise ConfigError(
            field,
            f"{folder} lacks {', '.join(missing)}",
            "Only safetensors checkpoints are loaded; save the model with save_pretrained, or fetch it again",
        )
    return files


def _digest(folder: Path, files: list[Path], field: str) -> str:
    total = hashlib.sha256(json.dumps(_architecture(folder), sort_keys=True).encode())
    tensors: dict[str, bytes] = {}
    for path in files:
        try:
            tensors |= _tensor_hashes(path)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(field, f"{path} is not a whole safetensors file ({error})", "Fetch it again") from error
    for name in sorted(tensors):
        total.update(name.encode() + b"\0" + tensors[name])
    return total.hexdigest()


def _architecture(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in _ARCHITECTURE_KEYS if config.get(key) is not None}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" in config:  # older files keep it beside the scaling, newer ones inside
        rope.setdefault("rope_theta", config["rope_theta"])
    return kept | {"rope": rope}


def _tensor_hashes(path: Path) -> dict[str, bytes]:
    """sha256 of dtype, shape and bytes of each tensor (layout: 8-byte length, JSON header, data)."""
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        hashes = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            if end > len(data):
                raise ValueError(f"tensor {name} ends after the file does")
            digest = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
            with memoryview(data) as view, view[begin:end] as part:
                digest.update(part)
            hashes[name] = digest.digest()
        return hashes


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def _remember(cache: Path, entry: dict[str, Any]) -> None:
    """Written beside and renamed, since replicas start together; a read-only home costs time, nothing else."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(entry))
        part.replace(cache)
    except OSError as error:
        log.warning("cannot cache the fingerprint in %s (%s): the next start hashes again", cache.parent, error)
