"""A target whose cache holds the tokens themselves: logits are a pure function of the text that its slots spell.

A slot that was overwritten, lost, shared by mistake or read too far changes the text and with it the answer, so a wrong
block table shows as a wrong token. It costs microseconds, which lets a test try thousands of schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from serving.spec.noise import gumbel
from shared.models.paged import Forward, Segment
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.tiny import END_ID, build_tiny_tokenizer

VOCAB = 16


def random_logits(text: Sequence[int], *, vocab: int = VOCAB) -> Tensor:  # [vocab]
    """Fixed noise for each text; the end token is as likely as any other."""
    seed = hash(tuple(text)) & (2**63 - 1)  # of integers: the same in every process
    return torch.from_numpy(np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 2)


class TokenTarget:
    """Stands in for a `PagedModel`."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        logits: Callable[[Sequence[int]], Tensor] = random_logits,
        vocab: int = VOCAB,
    ) -> None:
        self.kv = SimpleNamespace(num_blocks=blocks, block_size=block_size)
        self.feature_layers: tuple[int, ...] = ()
        self.loaded = SimpleNamespace(
            tokenizer=build_tiny_tokenizer(vocab),
            fingerprint="tokens:fp32",
            vocab_size=vocab,
            token_count=vocab,
            eos_token_ids=frozenset({END_ID}),
        )
        self._slots = [-1] * (blocks * block_size)
        self._logits = logits
        self.rows = 0  # read so far

    def forward(self, token_ids: Sequence[int], segments: Sequence[Segment], select: Sequence[int]) -> Forward:
        size, row, wanted, found = self.kv.block_size, 0, set(select), {}
        for segment in segments:
            slots = [segment.table[i // size] * size + i % size for i in range(segment.start + segment.count)]
            for position in range(segment.start, segment.start + segment.count):
                self._slots[slots[position]] = token_ids[row]
                if row in wanted:
                    found[row] = self._logits([self._slots[slot] for slot in slots[: position + 1]])
                row += 1
        assert row == len(token_ids), "the segments do not cover the rows"
        self.rows += row
        return Forward(torch.stack([found[row] for row in select]) if select else torch.empty(0, VOCAB), None)


def greedy_answer(prompt: Sequence[int], count: int, *, ignore_eos: bool = True) -> list[int]:
    """What `random_logits` says to a prompt, token by token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(random_logits(text).argmax()))
        if text[-1] == END_ID and not ignore_eos:
            break
    return text[len(prompt) :]


def seeded_answer(prompt: Sequence[int], count: int, sampling: Sampling, seed: int) -> list[int]:
    """What a request with a seed gets, from the definition of the coupling (law 3)."""
    text = list(prompt)
    for position in range(count):
        p = filtered_probs(random_logits(text)[None], sampling)[0]
        text.append(int((p.log() + gumbel(seed, [position], VOCAB, p.device)[0]).argmax()))
        if text[-1] == END_ID:
            break
    return text[len(prompt) :]
