"""One linear where several read the same input: queries, keys and values; gate and up.

Invariant: every weight is held once. What was three modules becomes views of one result, so the transformers model
goes on computing what it did, from the very weights that the fused decoder uses (slower: it is the reference).
Rows of query and key heads are stored in pairs (`rotary.pair_order`); the views undo that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.models.rotary import pair_order

QKV, GATE_UP = "fused_qkv", "fused_gate_up"  # names under an attention and an MLP module


class Part(nn.Module):
    """Some outputs of a linear, in the order of the module that stood here."""

    rows: Tensor  # [out] of the whole

    def __init__(self, whole: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.whole = whole
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(x)[..., self.rows]
        return out


def fuse_layer(layer: Any) -> None:
    """Fuses a Llama-shaped transformers layer in place; its own linears give up their weights."""
    attention, mlp = layer.self_attn, layer.mlp
    dim = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    orders = qkv_orders(heads, kv_heads, dim)
    _fuse(attention, QKV, ("q_proj", "k_proj", "v_proj"), orders)
    ups = [torch.arange(mlp.gate_proj.out_features), torch.arange(mlp.up_proj.out_features)]
    _fuse(mlp, GATE_UP, ("gate_proj", "up_proj"), ups)


def join(linears: Sequence[nn.Linear], orders: Sequence[Tensor]) -> nn.Linear:
    """One linear whose outputs are those of `linears`, each in its order; all have a bias, or none has."""
    pairs = list(zip(linears, orders, strict=True))
    weight = torch.cat([linear.weight.detach()[order.to(linear.weight.device)] for linear, order in pairs])
    biases = [linear.bias.detach()[order.to(linear.bias.device)] for linear, order in pairs if linear.bias is not None]
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return whole.train(linears[0].training)


def qkv_orders(heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orders of the query, key and value outputs of one fused linear."""
    order = pair_order(dim)
    return (
        _each_head(order, heads * dim, dim),
        _each_head(order, kv_heads * dim, dim),
        torch.arange(kv_heads * dim),
    )


def _each_head(order: Tensor, outputs: int, dim: int) -> Tensor:  # [outputs]
    return (torch.arange(0, outputs, dim)[:, None] + order).flatten()


def _fuse(parent: nn.Module, name: str, names: Sequence[str], orders: Sequence[Tensor]) -> None:
    linears = [parent.get_submodule(part) for part in names]
    whole = join(linears, orders)  # type: ignore[arg-type]
    setattr(parent, name, whole)
    first = 0
    for part, linear, order in zip(names, linears, orders, strict=True):
        linear.weight = linear.bias = None  # type: ignore[assignment]  # frees it, whoever holds it
        rows = (first + order.argsort()).to(whole.weight.device)
        setattr(parent, part, Part(whole, rows).train(linear.training))
        first += len(order)
