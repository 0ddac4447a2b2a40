"""How many calls a step of this release's engine makes, counted on the meta device: no weights, no time.

The engine's own forward runs over a model without memory, of one layer and of two, while every dispatched operation is
counted; the difference is a layer's. What a call costs is a figure of the machine (`ops.plan_measure`), so a step's
overhead follows from config and machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

from ops.plan_device import CallCosts
from ops.plan_shape import meta_model, read_config

# Operations that compute nothing: another view of a tensor, or a look at its type.
_VIEWS = frozenset(
    {
        "alias", "detach", "detach_", "expand", "flatten", "narrow", "permute", "reshape", "select", "slice", "split",
        "squeeze", "t", "to", "transpose", "unbind", "unsqueeze", "unflatten", "view", "split_with_sizes", "chunk",
    }
)  # fmt: skip
_PACKED_INT8 = 5  # beside the product: row maximum, clamp, division, and its multiplication back, a bias apart
_ROWS, _CONTEXT, _BLOCK = 2, 40, 16  # any will do: the number of calls does not depend on them


@dataclass(frozen=True)
class Calls:
    """Of one forward."""

    linears: int
    ops: int
    views: int

    def seconds(self, costs: CallCosts) -> float:
        return self.linears * costs.linear + self.ops * costs.op + self.views * costs.view

    def of_layers(self, layers: int, own: int) -> Calls:
        """Of a drafter that has `own` such layers where the counted model has `layers`."""
        return Calls(*(round(count * own / layers) for count in astuple(self)))


NO_CALLS = Calls(0, 0, 0)


def count_calls(spec: str, field: str, weights: str) -> Calls:
    """Of a decoding step of the model that `spec` (see `read_shape`) names. Raises ConfigError."""
    layers = read_config(spec, field).get_text_config(decoder=True).num_hidden_layers
    one, two = _count(spec, field, weights, 1), _count(spec, field, weights, 2)
    return Calls(
        *(first + (layers - 1) * (second - first) for first, second in zip(astuple(one), astuple(two), strict=True))
    )


def _count(spec: str, field: str, weights: str, layers: int) -> Calls:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from shared.models.paged import PagedKV, PagedModel, Segment
    from shared.models.target import LoadedModel

    found: Counter[str] = Counter()

    mode: Any = TorchDispatchMode  # carries no types

    class Counting(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[op._schema.name.partition("::")[2]] += 1
            return op(*args, **(kwargs or {}))

    config = read_config(spec, field).get_text_config(decoder=True)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = meta_model(config).eval()
    vocab = model.get_output_embeddings().weight.shape[0]
    loaded = LoadedModel(
        model=model,
        tokenizer=None,  # type: ignore[arg-type]  # no text is read
        name=spec,
        fingerprint="",
        weights=weights,
        device=torch.device("meta"),
        vocab_size=vocab,
        token_count=vocab,
        eos_token_ids=frozenset(),
        max_positions=_CONTEXT,
    )
    paged = PagedModel(loaded, PagedKV(_CONTEXT // _BLOCK + 1, _BLOCK))
    segment = Segment(list(range(_CONTEXT // _BLOCK + 1)), _CONTEXT - _ROWS, _ROWS)
    paged.forward([0] * _ROWS, [segment], range(_ROWS))  # pools are made in the first
    found.clear()
    with Counting():
        paged.forward([0] * _ROWS, [segment], range(_ROWS))
    linears = found["linear"] + found["addmm"] + found["mm"]
    views = sum(count for name, count in found.items() if name in _VIEWS)
    ops = sum(found.values()) - linears - views
    return Calls(linears, ops + (linears * _PACKED_INT8 if weights == "int8" else 0), views)
