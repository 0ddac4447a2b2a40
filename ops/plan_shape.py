"""What a model is made of, read from its config alone: parameters by their use, attention's widths, KV per token.

The module tree is built on torch's meta device, which allocates nothing, so the counts are those of the very classes
that would serve it, and no weight is ever read. Knows nothing of devices, time or load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # of a weight; int8's scales are one in thousands and left out


@dataclass(frozen=True)
class ModelShape:
    """Counts are parameters, not bytes."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    body: int  # matrices inside the layers that every token goes through
    head: int  # the matrix from the last hidden state to logits
    table: int = 0  # token embeddings, of which a token reads one row
    tied: bool = False  # head and table are one tensor in the checkpoint
    small: int = 0  # norms and biases
    experts: int = 0  # matrices of experts, in all layers together
    expert_count: int = 0  # experts of a layer
    experts_used: int = 0  # of them by one token
    problem: str = ""  # why this release's engine refuses the model whatever the device

    @property
    def parameters(self) -> int:
        return self.body + self.experts + self.small + (self.head if self.tied else self.head + self.table)

    @property
    def active(self) -> float:
        """Weights that multiply one token inside the layers."""
        return self.body + (self.experts * self.experts_used / self.expert_count if self.expert_count else 0)

    def read(self, rows: float) -> float:
        """Weights inside the layers that a step of so many rows reads; experts are chosen independently by each row."""
        if not self.expert_count:
            return self.body
        untouched = float((1 - self.experts_used / self.expert_count) ** rows)
        return self.body + self.experts * (1 - untouched)

    def weight_bytes(self, weights: str, *, on_cpu: bool) -> int:
        """In memory. A CPU keeps the embedding table in fp32; beside a packed head a tied table is a second copy."""
        packed = on_cpu and weights != "fp32"
        width, wide = BYTES[weights], 4 if on_cpu else BYTES[weights]
        shared = self.tied and not packed
        return (self.body + self.experts + self.head) * width + self.small * wide + (0 if shared else self.table * wide)

    def kv_bytes(self, width: int) -> int:
        """Keys and values of one token in every layer, `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def read_shape(spec: str, field: str) -> ModelShape:
    """The shape of a config.json, a folder with one, or a hub name. Raises ConfigError(field)."""
    from shared.models.support import check_supported, usable_positions

    config = read_config(spec, field)
    text = config.get_text_config(decoder=True)
    problem = ""
    try:
        check_supported(config, field)
    except ConfigError as error:
        problem = error.problem
    try:
        return _shape_of(text, _name_of(spec), usable_positions(text, field), problem)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            field, f"{spec} describes no decoder-only model ({error})", "Give such a model's config"
        ) from error


def read_config(spec: str, field: str) -> PreTrainedConfig:
    """The transformers config that `spec` names. Raises ConfigError(field)."""
    from transformers import AutoConfig

    from shared.models.target import is_path

    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(field, f"the folder {spec} holds no config.json", "Name one that save_pretrained made")
    elif not path.is_file() and is_path(spec):
        raise ConfigError(field, f"there is no file or folder {spec}", "Check the path")
    remedy = "Give a config.json, a folder with one, or a hub name"
    try:
        if path.is_file():
            tree = json.loads(path.read_text(encoding="utf-8"))
            config: PreTrainedConfig = AutoConfig.for_model(tree.pop("model_type"), **tree)
        else:
            config = AutoConfig.from_pretrained(spec, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(field, f"{spec} gives no model config ({first})", remedy) from error
    return config


def _name_of(spec: str) -> str:
    path = Path(spec)
    return path.resolve().parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else spec


def meta_model(config: PreTrainedConfig) -> Any:
    """The model's modules without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config  # carries no types
        return build(config, dtype=torch.float32, trust_remote_code=False)


def _shape_of(config: PreTrainedConfig, name: str, positions: int, problem: str) -> ModelShape:
    import torch

    model = meta_model(config)
    output, table = model.get_output_embeddings(), model.get_input_embeddings()
    body = experts = small = 0
    for module in model.modules():
        for weight_name, weight in module.named_parameters(recurse=False):
            if module is output or module is table:
                small += weight.numel() if weight_name == "bias" else 0
            elif isinstance(module, torch.nn.Linear) and weight_name == "weight":
                body += weight.numel()
            elif weight.ndim == 3:  # transformers stacks the experts of a layer
                experts += weight.numel()
            elif weight.ndim == 2:  # a matrix that is no Linear, as in GPT-2
                body += weight.numel()
            else:
                small += weight.numel()
    heads = config.num_attention_heads
    return ModelShape(
        name=name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=output.weight.shape[0],
        max_positions=positions,
        body=body,
        head=output.weight.numel(),
        table=table.weight.numel(),
        tied=bool(config.tie_word_embeddings),
        small=small,
        experts=experts,
        expert_count=_first(config, "num_local_experts", "num_experts", "n_routed_experts") if experts else 0,
        experts_used=_first(config, "num_experts_per_tok", "num_experts_per_token") if experts else 0,
        problem=problem,
    )


def _first(config: PreTrainedConfig, *names: str) -> int:
    found = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if found is None:
        raise ValueError(f"it has experts, but none of {', '.join(names)}")
    return int(found)
