"""Bytes of weights that one forward of a target reads: every linear layer once, in its weight format.

Counted from the architecture alone, so that it is the same number however a contender lays its weights out. Embedding
rows are left out: a step reads one for each token.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


def linear_bytes(config: Any, weights: str) -> int:
    """`config` is transformers' own; the output layer counts even where it is tied to the embedding."""
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    plain._attn_implementation = "eager"
    with torch.device("meta"):
        automatic: Any = AutoModelForCausalLM  # its constructors carry no types
        model = automatic.from_config(plain)
    linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return sum(linear.weight.numel() for linear in linears) * _BYTES[weights]
