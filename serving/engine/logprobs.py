"""Log-probabilities for those who ask: of the target's own logits, before any processing, always finite.

A token that was drawn under a mask, a penalty or a temperature is reported as the model itself judged it. It computes
only the rows of requests that ask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.engine.events import TokenLogprob
from serving.engine.sequence import Sequence as Running

_ROWS_AT_ONCE = 64  # of a prompt, so that no second copy of all its logits is ever made


def token_logprobs(
    logits: Tensor,  # [rows, vocab] raw; -inf marks padding
    token_ids: Sequence[int],  # one for each row
    top: int,  # alternatives, the token itself included if it is among them
) -> list[TokenLogprob]:
    """One for each row."""
    least = torch.finfo(torch.float32).min
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    lse = logits.float().logsumexp(-1, keepdim=True)
    own = (logits.gather(1, ids).float() - lse).clamp(least, 0.0).squeeze(1).tolist()
    values, found = logits.float().topk(min(top, logits.shape[1]), dim=-1)
    likeliest = (values - lse).clamp_max(0.0).tolist()
    return [
        TokenLogprob(token, logprob, tuple((id, value) for id, value in zip(row, shares, strict=True) if value > least))
        for token, logprob, row, shares in zip(token_ids, own, found.tolist(), likeliest, strict=True)
    ]


class PromptRows:
    """The rows of one step whose logits are wanted because they predict a prompt's tokens."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of the packed batch
        self._wanted: list[tuple[Running, int]] = []  # the sequence and how many of the rows are its

    def add(self, sequence: Running, count: int, first: int) -> None:
        """`count` unread tokens of the sequence, from `kv_len` on, stand at row `first` of the batch and after."""
        if sequence.request.params.prompt_logprobs is None:
            return
        known = len(sequence.prompt_logprobs)  # tokens; the row of a position predicts the token after it
        begin = max(known - 1, sequence.kv_len)
        end = min(sequence.kv_len + count, sequence.prompt_len - 1)
        if begin < end:
            self.rows.extend(range(first + begin - sequence.kv_len, first + end - sequence.kv_len))
            self._wanted.append((sequence, end - begin))

    def take(self, logits: Tensor) -> None:  # [rows, vocab]
        """Hand each sequence what its rows say, before its `kv_len` moves."""
        start = 0
        for sequence, count in self._wanted:
            top = sequence.request.params.prompt_logprobs or 0
            for first in range(0, count, _ROWS_AT_ONCE):
                rows = logits[start + first : start + min(first + _ROWS_AT_ONCE, count)]
                known = len(sequence.prompt_logprobs)
                ids = sequence.request.prompt_ids[known : known + len(rows)]
                sequence.prompt_logprobs.extend(token_logprobs(rows, ids, top))
            start += count
