"""Attention over a block-paged KV cache, for any transformers decoder and for the drafters' own layers.

Owns the layout: a block table names blocks; position i of a sequence is in slot `table[i // size] * size + i % size`.
A plan is built once a step and shared by all layers; its invariant is that a query sees exactly the keys of its own
sequence at its own and earlier positions (or the last `window` of them). Nobody clears a slot: rolling back is to
forget a length. It knows nothing of requests, sampling or who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from shared.models.target import LoadedModel

ATTENTION = "redraft_paged"
# Segments up to this many rows are padded into one batch; longer ones (prefill) are attended one by one.
_SHORT = 32


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence in a packed batch: positions start .. start+count-1 in the blocks of `table`."""

    table: Sequence[int]
    start: int
    count: int


class PagedKV:
    """Keys and values of every layer, [slots, kv_heads, head_dim] each, allocated when a layer first writes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer; `key` and `value` ([tokens, kv_heads, head_dim]) tell their shape and type."""
        pools = self._layers.get(index)
        if pools is None:
            slots = self.num_blocks * self.block_size
            pools = (key.new_zeros((slots, *key.shape[1:])), value.new_zeros((slots, *value.shape[1:])))
            self._layers[index] = pools
        return pools

    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self._layers.values() for pool in pools)


@dataclass
class _Group:
    """Segments attended together, padded to the longest."""

    rows: Tensor  # [b, q] row of the packed batch; padding repeats a row of its own segment
    blocks: Tensor  # [b * n] the n blocks of each segment; padding repeats its first
    keys: int  # l = n * block size, key positions read for each segment
    query_positions: Tensor  # [b, q]
    keep: Tensor | None  # [valid] flat (b, q) places that are not padding; None: all are
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int, heads_per_kv: int) -> Tensor:  # [b, 1, heads_per_kv * q, l] bool
        """True where a query may look. Kept per window size, since every layer of a kind asks for the same one."""
        found = self.masks.get((window, heads_per_kv))
        if found is None:
            keys = torch.arange(self.keys, device=self.rows.device)
            queries = self.query_positions[:, :, None]
            seen = keys <= queries
            if window:
                seen = seen & (keys > queries - window)
            found = seen.repeat(1, heads_per_kv, 1).unsqueeze(1)
            self.masks[(window, heads_per_kv)] = found
        return found


class AttentionPlan:
    """Where each row of a packed batch writes its key and which keys it reads."""

    def __init__(self, kv: PagedKV, segments: Sequence[Segment], device: torch.device) -> None:
        self.kv = kv
        size = kv.block_size
        positions: list[int] = []
        slots: list[int] = []
        short: list[tuple[int, Segment]] = []
        long: list[tuple[int, Segment]] = []
        for segment in segments:
            (short if segment.count <= _SHORT else long).append((len(positions), segment))
            for position in range(segment.start, segment.start + segment.count):
                positions.append(position)
                slots.append(segment.table[position // size] * size + position % size)
        self.positions = torch.tensor(positions, device=device)  # [tokens]
        self.slots = torch.tensor(slots, device=device)  # [tokens]
        packs = ([short] if short else []) + [[item] for item in long]
        self.groups = [self._group(pack, device) for pack in packs]
        self.order = self._order(packs, device)  # [tokens] or None: where packed row i is in the groups' outputs

    def _group(self, pack: list[tuple[int, Segment]], device: torch.device) -> _Group:
        size = self.kv.block_size
        width = max(segment.count for _, segment in pack)
        length = max(segment.start + segment.count for _, segment in pack)
        blocks = -(-length // size)
        rows: list[list[int]] = []
        queries: list[list[int]] = []
        tables: list[list[int]] = []
        keep: list[int] = []
        for index, (first, segment) in enumerate(pack):
            offsets = [min(i, segment.count - 1) for i in range(width)]
            rows.append([first + i for i in offsets])
            queries.append([segment.start + i for i in offsets])
            table = list(segment.table[:blocks])
            tables.append(table + [table[0]] * (blocks - len(table)))
            keep.extend(index * width + i for i in range(segment.count))
        padded = len(keep) < len(pack) * width
        return _Group(
            rows=torch.tensor(rows, device=device),
            blocks=torch.tensor(tables, device=device).flatten(),
            keys=blocks * size,
            query_positions=torch.tensor(queries, device=device),
            keep=torch.tensor(keep, device=device) if padded else None,
        )

    @staticmethod
    def _order(packs: list[list[tuple[int, Segment]]], device: torch.device) -> Tensor | None:
        firsts = [item for pack in packs for item in pack]
        if all(a[0] < b[0] for a, b in pairwise(firsts)):
            return None
        grouped = [row for first, segment in firsts for row in range(first, first + segment.count)]
        order = torch.empty(len(grouped), dtype=torch.long)
        order[torch.tensor(grouped)] = torch.arange(len(grouped))
        return order.to(device)

    def attend(
        self,
        layer: int,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,  # [tokens, kv_heads, head_dim]
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:  # [tokens, heads, head_dim]
        """Writes the rows' keys and values, then attends."""
        keys, values = self.kv.layer(layer, key, value)
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        outputs = [
            _attend_group(group, query, keys, values, self.kv.block_size, scale=scale, window=window, softcap=softcap)
            for group in self.groups
        ]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if self.order is None else out[self.order]


def _gather(pool: Tensor, group: _Group, block_size: int) -> Tensor:  # [b, kv_heads, l, dim]
    """Whole blocks, because copying rows one by one is several times slower."""
    kv_heads, dim = pool.shape[1:]
    blocks = pool.view(-1, block_size * kv_heads * dim).index_select(0, group.blocks)
    return blocks.view(len(group.rows), group.keys, kv_heads, dim).transpose(1, 2)


def _attend_group(
    group: _Group,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_size: int,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:  # [valid rows, heads, head_dim]
    b, q = group.rows.shape
    heads, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    per_kv = heads // kv_heads
    # Grouped heads become extra query rows of their shared key head, so no key is repeated in memory.
    rows = (
        query[group.rows].view(b, q, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, per_kv * q, dim)
    )
    k = _gather(keys, group, block_size)  # [b, kv_heads, l, dim]
    v = _gather(values, group, block_size)
    mask = group.mask(window, per_kv)
    if softcap:
        scores = softcap * torch.tanh(rows @ k.transpose(2, 3) * (scale / softcap))
        out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    else:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    out = out.view(b, kv_heads, per_kv, q, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(b * q, heads, v.shape[-1])
    return out if group.keep is None else out[group.keep]


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer (`AttentionInterface`)."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scale,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out.unsqueeze(0), None


@dataclass(frozen=True)
class Forward:
    """What a forward returns."""

    logits: Tensor  # [selected, vocab] float32; ids that are padding are -inf
    features: Tensor | None  # [tokens, layers * hidden] outputs of the asked layers, side by side


class PagedModel:
    """A transformers causal LM whose attention reads and writes a PagedKV."""

    def __init__(self, loaded: LoadedModel, kv: PagedKV, feature_layers: Sequence[int] = ()) -> None:
        AttentionInterface.register(ATTENTION, paged_attention)
        self.loaded, self.kv = loaded, kv
        self._model: PreTrainedModel = loaded.model
        self._model.set_attn_implementation(ATTENTION)
        self._captured: dict[int, Tensor] = {}
        self.feature_layers = tuple(feature_layers)
        layers = self._model.get_decoder().layers  # type: ignore[no-untyped-call]
        for index in self.feature_layers:
            layers[index].register_forward_hook(self._capture(index))

    def _capture(self, index: int):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._captured[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        select: Sequence[int],  # rows whose logits are wanted
    ) -> Forward:
        """One packed forward; writes the rows' KV. `token_ids` holds the segments' rows one after the other."""
        device = self.loaded.device
        plan = AttentionPlan(self.kv, segments, device)
        output = self._model(
            input_ids=torch.tensor(token_ids, device=device).unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(select, device=device, dtype=torch.long),
            plan=plan,
        )
        logits = output.logits[0].float()
        if self.loaded.token_count < logits.shape[-1]:
            logits[:, self.loaded.token_count :] = float("-inf")
        features = None
        if self.feature_layers:
            features = torch.cat([self._captured[index][0] for index in self.feature_layers], dim=-1)
        return Forward(logits, features)
