"""Reads the keys of a packed batch one sequence at a time, where they lie: for CPUs.

A sequence whose blocks follow each other is read through a view of the pool; only scattered blocks are copied. Whole
blocks are read, and a mask hides what is not a row's to see: the kernel adds up keys by vectors and the rest singly,
so a row that decodes alone and the same row in front of drafts must have the same vectors. With blocks of a multiple of
16 a row's result is then bitwise the same whatever shares the batch and however many drafts follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from shared.models.attention import Segment

# Up to here, the rows of all heads that share a key head are multiplied with it at once; above, a mask that repeats
# for every head would be larger than what it saves.
_SHORT = 32


@dataclass(frozen=True)
class _Span:
    """The keys that one segment reads: `length` slots in a row, of the pool or of the copied blocks."""

    first: int  # packed row
    count: int  # rows
    start: int  # position of the first row
    low: int  # position of the first key read, and the end of the last block
    high: int
    slot: int
    copied: bool

    @property
    def length(self) -> int:
        return self.high - self.low


class SequenceReads:
    """What an `AttentionPlan` reads through on a CPU."""

    def __init__(self, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self._segments, self._size, self._device = segments, block_size, device
        self._spans: dict[int, tuple[list[_Span], Tensor | None]] = {}  # by window
        self._masks: dict[tuple[int, int, int], Tensor] = {}  # by window, first row, rows of each position

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
        found = self._spans.get(window)
        if found is None:
            found = self._spans[window] = self._find(window)
        spans, blocks = found
        copied = pool
        if blocks is not None:
            width = pool.shape[1]
            copied = pool.view(-1, self._size * width).index_select(0, blocks).view(-1, width)
        sources = [copied if span.copied else pool for span in spans]
        if len(spans) == len(query) and not softcap:
            masks = [self._mask(span, window, 1) for span in spans]
            return _decode(spans, sources, masks, query, kv_heads, scale)
        outputs = [
            self._read(span, source, query, kv_heads, scale, window, softcap)
            for span, source in zip(spans, sources, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _find(self, window: int) -> tuple[list[_Span], Tensor | None]:
        spans: list[_Span] = []
        blocks: list[int] = []
        first, size = 0, self._size
        for segment in self._segments:
            low = max(0, segment.start - window + 1) // size * size if window else 0
            last = -(-(segment.start + segment.count) // size)
            needed = segment.table[low // size : last]
            copied = any(b - a != 1 for a, b in pairwise(needed))
            place = len(blocks) if copied else needed[0]
            if copied:
                blocks.extend(needed)
            spans.append(_Span(first, segment.count, segment.start, low, last * size, place * size, copied))
            first += segment.count
        return spans, torch.tensor(blocks, device=self._device) if blocks else None

    def _read(
        self, span: _Span, source: Tensor, query: Tensor, kv_heads: int, scale: float, window: int, softcap: float
    ) -> Tensor:  # [count, heads * value_dim]
        heads, dim = query.shape[1:]
        count = span.count
        k, v = _keys_and_values(span, source, kv_heads, dim)
        value_dim = v.shape[-1]
        rows = query if count == len(query) else query[span.first : span.first + count]
        if softcap or count <= _SHORT:
            per_kv = heads // kv_heads
            # Heads that share a key head become extra rows of it, so no key is repeated.
            grouped = rows.view(count, kv_heads, per_kv, dim).transpose(0, 1).reshape(1, kv_heads, count * per_kv, dim)
            mask = self._mask(span, window, per_kv)
            if softcap:
                scores = softcap * torch.tanh(grouped @ k.transpose(2, 3) * (scale / softcap))
                out = (scores + mask).softmax(-1) @ v
            else:
                out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            return out.view(kv_heads, count, per_kv, value_dim).transpose(0, 1).reshape(count, heads * value_dim)
        plain = span.start == span.low == 0 and not window  # a prompt from its beginning
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=None if plain else self._mask(span, window, 1),
            is_causal=plain,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(count, heads * value_dim)

    def _mask(self, span: _Span, window: int, per_kv: int) -> Tensor:  # [count * per_kv, length] 0 or -inf
        """Kept, since every layer of a kind asks for the same one."""
        key = (window, span.first, per_kv)
        found = self._masks.get(key)
        if found is None:
            hidden = torch.full((span.count, span.length), float("-inf"), device=self._device)
            found = hidden.triu(span.start - span.low + 1)
            if window:
                found += hidden.tril(span.start - span.low - window)
            found = self._masks[key] = found.repeat_interleave(per_kv, 0) if per_kv > 1 else found
        return found


def _decode(
    spans: list[_Span], sources: list[Tensor], masks: list[Tensor], query: Tensor, kv_heads: int, scale: float
) -> Tensor:
    """One row of each sequence: few operations for each."""
    heads, dim = query.shape[1:]
    rows = torch.split(query.view(len(spans), kv_heads, heads // kv_heads, dim), 1)
    outputs = [
        F.scaled_dot_product_attention(row, *_keys_and_values(span, source, kv_heads, dim), attn_mask=mask, scale=scale)
        for row, span, source, mask in zip(rows, spans, sources, masks, strict=True)
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [tokens, kv_heads, heads / kv_heads, value_dim]
    return out.reshape(len(spans), -1)


def _keys_and_values(
    span: _Span, source: Tensor, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor]:  # [1, kv_heads, length, dim], [1, kv_heads, length, value_dim], where they lie
    width = source.shape[1]
    value_dim, where = width // kv_heads - dim, span.slot * width
    k = source.as_strided((1, kv_heads, span.length, dim), (0, dim, width, 1), where)
    v = source.as_strided((1, kv_heads, span.length, value_dim), (0, value_dim, width, 1), where + kv_heads * dim)
    return k, v
