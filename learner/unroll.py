"""Drafting many steps ahead on recorded text, all rows at once ("training-time test", Li et al. 2025, section 3.1).

Invariant: depth k at row i computes exactly what serving computes when a round starts at row i - k + 1 on the recorded
tokens and feeds itself: depth-1 keys of rows up to the start, then one key of each deeper step, its own last.
A language model's distribution does not depend on self-fed features: it has one depth, which stands for all.
It knows nothing of targets, losses or filters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.example import Batch
from shared.models.eagle3 import Eagle3Head
from shared.processing import Vocabulary

Drafter = Eagle3Head | PreTrainedModel


@dataclass(frozen=True)
class DepthRows:
    """The wanted rows at one depth. Deep ones need rows before them, so the first may be missing."""

    picks: Tensor  # [m'] indices into the batch's wanted rows
    hidden: Tensor  # [m', width]
    project: Callable[[Tensor], Tensor]  # [..., width] -> [..., vocab]; the dear part, so callers choose rows
    vocab: int


def shift_of(drafter: Drafter) -> int:
    """How far a row's own token lies behind what it reads; see `learner.example`."""
    return 1 if isinstance(drafter, Eagle3Head) else 0


def vocabulary_of(drafter: Drafter) -> Vocabulary | None:
    """What a head's columns stand for; None where columns are target ids."""
    return Vocabulary.of(drafter.draft_ids) if isinstance(drafter, Eagle3Head) else None


def column_index(drafter: Drafter) -> Tensor | None:  # [largest id + 2]
    """Column of each target id, -1 where there is none; the last entry stands for all larger ids. None as above."""
    vocabulary = vocabulary_of(drafter)
    return None if vocabulary is None else vocabulary.columns


def unroll(drafter: Drafter, batch: Batch, depths: int) -> list[DepthRows]:
    """Depth 1 first. A language model returns one entry, whatever `depths` is."""
    if isinstance(drafter, Eagle3Head):
        return _unroll_head(drafter, batch, depths)
    return [_language_model(drafter, batch)]


def _unroll_head(head: Eagle3Head, batch: Batch, depths: int) -> list[DepthRows]:
    assert batch.features is not None, "a head is trained and judged on packed features"
    recorder = _CausalKeys()
    # The residual stream stays float32 under autocast; only the linears are rounded.
    fused = head.fuse(batch.features).float()
    hidden = head(batch.token_ids, fused, batch.positions, recorder.attend)  # [b, rows, hidden]
    everything = torch.arange(len(batch.row), device=batch.row.device)
    found = [DepthRows(everything, hidden[batch.example, batch.row], head.logits, head.config.draft_vocab)]
    if depths == 1 or not len(everything):
        return found
    window = _window(batch, depths)
    column = batch.row - window[batch.example, 0]  # [m] place of each wanted row in its window
    inside = window.clamp_max(batch.token_ids.shape[1] - 1)  # padding repeats the last row; nobody reads it
    token_ids, positions = batch.token_ids.gather(1, inside), batch.positions.gather(1, inside)
    hidden = _take_rows(hidden, inside)
    deeper = _SelfFedKeys(recorder.keys, recorder.values, inside)
    for depth in range(2, depths + 1):
        hidden = head(token_ids, _later(hidden, 1), positions, deeper.attend)  # [b, window, hidden]
        picks = everything[column >= depth - 1]
        found.append(
            DepthRows(picks, hidden[batch.example[picks], column[picks]], head.logits, head.config.draft_vocab)
        )
    return found


def _window(batch: Batch, depths: int) -> Tensor:  # [b, window] columns of `token_ids` that deep steps pass through
    """From depths - 1 rows before an example's first wanted row to its last one: prompts are left out."""
    count, width = batch.token_ids.shape
    first = torch.full((count,), width, device=batch.row.device)
    last = torch.zeros((count,), dtype=torch.long, device=batch.row.device)
    first = first.scatter_reduce(0, batch.example, batch.row, "amin")
    last = last.scatter_reduce(0, batch.example, batch.row, "amax")
    start = (first - (depths - 1)).clamp_min(0)
    longest = int((last - start).max()) + 1
    return start[:, None] + torch.arange(longest, device=start.device)


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:  # [b, rows, width], [b, window] -> [b, window, width]
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


def _later(x: Tensor, by: int) -> Tensor:  # [b, window, ...]
    """Row i holds what row i - by held; the first rows are zeros."""
    if by == 0:
        return x
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], dim=1)


class _CausalKeys:
    """Plain causal attention over a batch, keeping its keys and values for the deeper steps."""

    keys: Tensor  # [b, rows, kv_heads, head_dim]
    values: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.keys, self.values = key, value
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2).to(query.dtype),
            value.transpose(1, 2).to(query.dtype),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2)  # [b, rows, heads, head_dim]


class _SelfFedKeys:
    """Attention of depth 2 and on; one call of `attend` a depth, in order."""

    def __init__(self, keys: Tensor, values: Tensor, window: Tensor) -> None:
        self._keys, self._values, self._window = keys, values, window
        self._own: list[tuple[Tensor, Tensor]] = []  # keys and values of depth 2, 3, ... [b, window, kv_heads, dim]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self._own.append((key, value))
        depth = len(self._own) + 1
        b, window, heads, dim = query.shape
        grouped = query.view(b, window, key.shape[2], -1, dim)  # [b, w, kv_heads, heads per kv, dim]
        # The key of depth d on the way to row i lies depth - d rows before it.
        way = [(_later(k, depth - d), _later(v, depth - d)) for d, (k, v) in enumerate(self._own, start=2)]
        far = torch.einsum("bwkgd,brkd->bkgwr", grouped, self._keys.to(query.dtype))
        near = torch.stack([(grouped * k.unsqueeze(3)).sum(-1) for k, _ in way], dim=-1)  # [b, w, kv, g, depth - 1]
        seen = torch.arange(self._keys.shape[1], device=query.device) <= (self._window - depth + 1)[:, :, None]
        far = far.masked_fill(~seen[:, None, None], float("-inf"))
        near = near.permute(0, 2, 3, 1, 4).to(far.dtype)  # [b, kv, g, w, depth - 1]
        weights = (torch.cat([far, near], dim=-1).float() * scale).softmax(-1).to(value.dtype)
        count = self._keys.shape[1]
        out = torch.einsum("bkgwr,brkd->bwkgd", weights[..., :count], self._values.to(value.dtype))
        for place, (_, v) in enumerate(way):
            out = out + weights[..., count + place].permute(0, 3, 1, 2).unsqueeze(-1) * v.unsqueeze(3)
        return out.reshape(b, window, heads, dim)


def _language_model(model: PreTrainedModel, batch: Batch) -> DepthRows:
    """The wanted rows are cut out in front of the output embedding, so what the model does to logits after it stays."""
    flat = batch.example * batch.token_ids.shape[1] + batch.row

    def cut(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flatten(0, 1)[flat], *args[1:])

    output_embedding: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook = output_embedding.register_forward_pre_hook(cut)
    try:
        # Padding comes last and attention is causal, so no row that counts can see it and no mask is needed.
        out = model(input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False)
    finally:
        hook.remove()
    everything = torch.arange(len(flat), device=flat.device)
    return DepthRows(everything, out.logits, nn.Identity(), out.logits.shape[1])
