"""Who runs in the next step, and with how many rows: higher priority first, then first come, first served.

Owns the waiting queue, the running batch and, through the allocator, every block table. Decoding requests always go;
prompts share `prefill_tokens` beside them. When blocks run out, the youngest running request of the lowest priority is
put back, ahead of those that came after it, and recomputed later. Nobody starves: who was overtaken `PATIENCE` times
goes before all; and since a request that could never fit is refused at the door, the first in this order always ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from serving.engine.kv import BlockAllocator
from serving.engine.prefix import PrefixCache
from serving.engine.sequence import Sequence

PATIENCE = 32


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


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    """The order of admission, of prefill and, backwards, of preemption. It does not change while a request runs."""
    return sequence.overtaken < PATIENCE, -sequence.request.params.priority, sequence.place


class Scheduler:
    """Continuous batching over one allocator."""

    def __init__(
        self, allocator: BlockAllocator, *, max_batch: int, prefill_tokens: int, prefix: PrefixCache | None = None
    ) -> None:
        self.allocator, self._prefix = allocator, prefix
        self._max_batch, self._prefill_tokens = max_batch, prefill_tokens
        self.waiting: list[Sequence] = []  # both in the order of rank
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0
        self._put_back: set[str] = set()  # in this step

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.place = self._arrivals
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Ended, for whatever reason: its blocks are free again."""
        self.allocator.release(sequence.table)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def admit(self) -> None:
        """Move waiting requests into the batch while there is room for their prompts; nobody overtakes the first."""
        while self.waiting and len(self.running) < self._max_batch and self._let_in(self.waiting[0]):
            head = self.waiting.pop(0)
            insort(self.running, head, key=_rank)
            self._note_overtaking(head)

    def _let_in(self, sequence: Sequence) -> bool:
        """Blocks for its whole text, and one more for each running request, which else would be put back at once."""
        found = self._prefix.find(sequence) if self._prefix is not None else []
        missing = self.allocator.blocks_for(len(sequence.tokens) + 1) - len(found)
        room = self.allocator.free - self.allocator.idle_among(found)
        if missing + len(self.running) > room:
            return False
        if self._prefix is not None:
            self._prefix.take(sequence, found)
        return self.allocator.grow(sequence.table, len(sequence.tokens) + 1)

    def _note_overtaking(self, admitted: Sequence) -> None:
        older = [sequence for sequence in self.waiting if sequence.place < admitted.place]
        for sequence in older:
            sequence.overtaken += 1
        if any(sequence.overtaken == PATIENCE for sequence in older):
            self.waiting.sort(key=_rank)

    def plan(self, gammas: dict[str, int]) -> list[Work]:
        """The next step's work; `gammas` holds the wish of each decoding request by id. Every row has its slot."""
        budget = self._prefill_tokens
        works: list[Work] = []
        coming: set[bytes] = set()  # names of the blocks that this very step fills
        self._put_back.clear()
        for sequence in list(self.running):
            if sequence.id in self._put_back:
                continue  # for one ahead of it; those planned already are ahead of both
            count, gamma = 1, 0
            if sequence.decoding:
                gamma = gammas.get(sequence.id, 0)
            else:
                count = self._prompt_share(sequence, budget, coming)
                budget -= count
                if not count:
                    continue
            if self._reserve(sequence, sequence.kv_len + count + gamma):
                works.append(Work(sequence, count, gamma))
            elif self._reserve(sequence, sequence.kv_len + count, preempt=True):
                works.append(Work(sequence, count))
        return works

    def _prompt_share(self, sequence: Sequence, budget: int, coming: set[bytes]) -> int:
        """Tokens of a prompt to read in this step.

        None while most of them are being read by another: the next step finds them in the cache. That is how several
        choices of one prompt share it. A piece ends with a block, so that the next one may still find its blocks.
        """
        if self._prefix is None:
            return min(len(sequence.tokens) - sequence.kv_len, budget)
        self._prefix.take(sequence, self._prefix.find(sequence))
        size, unread = self.allocator.block_size, len(sequence.tokens) - sequence.kv_len
        names = self._prefix.names(sequence)
        if 2 * size * sum(1 for name in names if name in coming) > unread:
            return 0
        if unread > budget >= size:
            unread = budget - (sequence.kv_len + budget) % size
        count = min(unread, budget)
        coming.update(names[: count // size])
        return count

    def _reserve(self, sequence: Sequence, positions: int, *, preempt: bool = False) -> bool:
        while not self.allocator.grow(sequence.table, positions):
            if not preempt:
                return False
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.release(sequence.table)
        sequence.forget_cache()
        if sequence.recorder is not None:
            sequence.recorder.restart()
        insort(self.waiting, sequence, key=_rank)
        self._put_back.add(sequence.id)
        self.preemptions += 1
