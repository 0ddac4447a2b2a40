"""Reads the keys of a packed batch for all sequences in one call, padded to the longest: for GPUs.

Few calls of fixed shapes matter there more than the bytes that are copied. Short segments share one call, long ones
(prompts) are attended one by one. It runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from shared.models.attention import Segment

_SHORT = 32  # rows


@dataclass
class Group:
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


class BatchedReads:
    """What an `AttentionPlan` reads through on a GPU."""

    def __init__(self, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self._size = block_size
        short: list[tuple[int, Segment]] = []
        long: list[tuple[int, Segment]] = []
        first = 0
        for segment in segments:
            (short if segment.count <= _SHORT else long).append((first, segment))
            first += segment.count
        packs = ([short] if short else []) + [[item] for item in long]
        self._groups = [self._group(pack, device) for pack in packs]
        self._order = _order(packs, device)  # [tokens] or None: where packed row i is in the groups' outputs

    @classmethod
    def of(cls, group: Group, block_size: int) -> BatchedReads:
        """Over tensors that somebody else fills."""
        reads = cls([], block_size, group.rows.device)
        reads._groups = [group]
        return reads

    def attend(
        self,
        pool: Tensor,  # [slots, kv_heads * (key_dim + value_dim)]
        query: Tensor,  # [tokens, heads, key_dim]
        *,
        kv_heads: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:  # [tokens, heads * value_dim]
        outputs = [self._read(group, pool, query, kv_heads, scale, window, softcap) for group in self._groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if self._order is None else out[self._order]

    def _group(self, pack: list[tuple[int, Segment]], device: torch.device) -> Group:
        size = self._size
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
        return Group(
            rows=torch.tensor(rows, device=device),
            blocks=torch.tensor(tables, device=device).flatten(),
            keys=blocks * size,
            query_positions=torch.tensor(queries, device=device),
            keep=torch.tensor(keep, device=device) if padded else None,
        )

    def _read(
        self, group: Group, pool: Tensor, query: Tensor, kv_heads: int, scale: float, window: int, softcap: float
    ) -> Tensor:  # [valid rows, heads * value_dim]
        b, q = group.rows.shape
        heads, dim = query.shape[1:]
        width, per_kv = pool.shape[1], heads // kv_heads
        # Grouped heads become extra query rows of their shared key head, so no key is repeated in memory.
        rows = query[group.rows].view(b, q, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(b, kv_heads, per_kv * q, dim)
        # Whole blocks, because copying rows one by one is several times slower.
        read = pool.view(-1, self._size * width).index_select(0, group.blocks).view(b, group.keys, width)
        k = read[:, :, : kv_heads * dim].view(b, group.keys, kv_heads, dim).transpose(1, 2)  # [b, kv_heads, l, dim]
        v = read[:, :, kv_heads * dim :].view(b, group.keys, kv_heads, -1).transpose(1, 2)
        mask = group.mask(window, per_kv)
        if softcap:
            scores = softcap * torch.tanh(rows @ k.transpose(2, 3) * (scale / softcap))
            out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        out = out.view(b, kv_heads, per_kv, q, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(b * q, -1)
        return out if group.keep is None else out.index_select(0, group.keep)


def _order(packs: list[list[tuple[int, Segment]]], device: torch.device) -> Tensor | None:
    firsts = [item for pack in packs for item in pack]
    if all(a[0] < b[0] for a, b in pairwise(firsts)):
        return None
    grouped = [row for first, segment in firsts for row in range(first, first + segment.count)]
    order = torch.empty(len(grouped), dtype=torch.long)
    order[torch.tensor(grouped)] = torch.arange(len(grouped))
    return order.to(device)
