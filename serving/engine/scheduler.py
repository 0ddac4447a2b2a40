"""Who runs in the next step, and with how many rows: first come, first served, within blocks and a prefill budget.

Owns the waiting queue, the running batch and, through the allocator, every block table. Decoding requests always go;
prompts share `prefill_tokens` beside them. When blocks run out the youngest running request is put back at the head
of the queue and recomputed later; since a request that could never fit is refused at the door, the oldest always ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from serving.engine.kv import BlockAllocator
from serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step: `count` unread tokens from `kv_len` on, and room for `gamma` drafts."""

    sequence: Sequence
    count: int
    gamma: int = 0

    @property
    def decides(self) -> bool:
        """True when the last of the tokens is the newest, so that its logits give a new one."""
        return self.sequence.kv_len + self.count == len(self.sequence.tokens)


class Scheduler:
    """Continuous batching over one allocator."""

    def __init__(self, allocator: BlockAllocator, *, max_batch: int, prefill_tokens: int) -> None:
        self.allocator = allocator
        self._max_batch, self._prefill_tokens = max_batch, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ended, for whatever reason: its blocks are free again."""
        self.allocator.release(sequence.table)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def admit(self) -> None:
        """Move waiting requests into the batch while there is room for their prompts."""
        while self.waiting and len(self.running) < self._max_batch:
            head = self.waiting[0]
            if not self.allocator.grow(head.table, len(head.tokens) + 1):
                return
            self.running.append(self.waiting.popleft())

    def plan(self, gammas: dict[str, int]) -> list[Work]:
        """The next step's work; `gammas` holds the wish of each decoding request by id. Every row has its slot."""
        budget = self._prefill_tokens
        works: list[Work] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # put back for an older one in this very loop; those planned already are older still
            count = len(sequence.tokens) - sequence.kv_len
            if not sequence.decoding:
                count = min(count, budget)
                budget -= count
            if not count:
                continue
            gamma = gammas.get(sequence.id, 0) if sequence.decoding else 0
            if self._reserve(sequence, sequence.kv_len + count + gamma):
                works.append(Work(sequence, count, gamma))
            elif self._reserve(sequence, sequence.kv_len + count, preempt=True):
                works.append(Work(sequence, count))
        return works

    def _reserve(self, sequence: Sequence, positions: int, *, preempt: bool = False) -> bool:
        while not self.allocator.grow(sequence.table, positions):
            if not preempt:
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.release(sequence.table)
        sequence.forget_cache()
        if sequence.recorder is not None:
            sequence.recorder.restart()
        self.waiting.appendleft(sequence)
        self.preemptions += 1
