"""Prefix reuse: requests that begin alike share the blocks of their common beginning.

A block's name is a chained hash of the tenant, all tokens up to its end *and the one after it*, because a feature
head's row reads the next token. So a shared block is right in every pool: the target's KV and features depend on the
tokens alone; the drafter's rows also on its version, which is kept beside the name. Rows of another version are not
trusted: the drafter reads the prefix again, from the stored features. Nobody ever writes to a shared block's target
rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from torch import Tensor

from serving.drafters.base import Drafter
from serving.engine.feature_pool import FeaturePool
from serving.engine.kv import BlockAllocator
from serving.engine.sequence import Sequence
from shared.models.paged import Segment


class PrefixCache:
    """Names the blocks that sequences fill, and gives sequences the blocks of others."""

    def __init__(self, allocator: BlockAllocator, drafter: Drafter | None, features: FeaturePool | None) -> None:
        self._allocator, self._drafter, self._features = allocator, drafter, features
        self._size = allocator.block_size
        self.reused = 0  # positions that were not computed again

    def names(self, sequence: Sequence) -> list[bytes]:
        """Of the unread blocks that `sequence` might share, from the next on; empty amidst a block.

        Two tokens are left to read at least: one decides, and the one before gives a head its first row.
        """
        first, partial = divmod(sequence.kv_len, self._size)
        end = (len(sequence.tokens) - 2) // self._size
        if partial or first >= end or sequence.request.params.prompt_logprobs is not None:
            return []  # logprobs of the prompt come out of its own forward
        return self._names(sequence, end)[first:end]

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold what `sequence` would read next."""
        return self._allocator.find(self.names(sequence))

    def take(self, sequence: Sequence, blocks: list[int]) -> None:
        """The sequence goes on behind `blocks`, which were found for it; what it held in their place is released."""
        if not blocks:
            return
        first = sequence.kv_len
        place = slice(first // self._size, first // self._size + len(blocks))
        self._allocator.share(blocks)
        own, sequence.table[place] = sequence.table[place], blocks
        self._allocator.release(own)
        sequence.kv_len += len(blocks) * self._size
        sequence.kept_blocks = sequence.kv_len // self._size
        self.reused += sequence.kv_len - first
        self._trust(sequence, first, blocks)
        if self._features is not None:
            self._hand_over(sequence, first, self._features.read(sequence.table, first, sequence.kv_len))

    def _trust(self, sequence: Sequence, first: int, blocks: list[int]) -> None:
        """The drafter goes on behind those blocks that its present version has read throughout."""
        state, drafter = sequence.draft, self._drafter
        if drafter is None or state.kv_len != first or state.version not in ("", drafter.version):
            return
        for block in blocks:
            if self._allocator.drafter_of(block) != drafter.version:
                break
            state.kv_len += self._size
            state.version = drafter.version
        state.marked_blocks = state.kv_len // self._size

    def _hand_over(self, sequence: Sequence, first: int, features: Tensor) -> None:
        """As after a forward of the target."""
        if sequence.recorder is not None:
            sequence.recorder.read(features)
        unread = features[max(sequence.draft.kv_len - first, 0) :]
        if self._drafter is not None and len(unread):
            self._drafter.commit(sequence, 0, unread)

    def store(self, segments: Iterable[Segment], features: Tensor | None) -> None:
        """What the target's forward gave beside logits."""
        if self._features is not None and features is not None:
            self._features.write(segments, features)

    def keep(self, sequence: Sequence) -> None:
        """Name the blocks that the target has filled with committed tokens since."""
        full = min(sequence.kv_len, len(sequence.tokens) - 1) // self._size
        if full <= sequence.kept_blocks:
            return
        names = self._names(sequence, full)
        for index in range(sequence.kept_blocks, full):
            self._allocator.name(sequence.table[index], names[index])
        sequence.kept_blocks = full

    def before_draft(self, sequence: Sequence) -> None:
        """The drafter is about to write its rows from `draft.kv_len` on."""
        for block in sequence.table[sequence.draft.kv_len // self._size :]:
            self._allocator.set_drafter(block, None)

    def after_draft(self, sequence: Sequence, version: str) -> None:
        """It has; blocks of which this version wrote every row, and every row before, are marked as its own."""
        state = sequence.draft
        state.version = version if state.version in ("", version) else None
        full = min(state.kv_len, sequence.kv_len) // self._size
        if state.version == version:
            for block in sequence.table[state.marked_blocks : full]:
                self._allocator.set_drafter(block, version)
        state.marked_blocks = full

    def _names(self, sequence: Sequence, count: int) -> list[bytes]:
        names, size = sequence.block_names, self._size
        # The first hash is keyed by the tenant: nobody can tell from an answer's delay what another tenant has sent.
        root = blake2b(sequence.request.tenant.encode(), digest_size=16).digest()
        for first in range(len(names) * size, count * size, size):
            text = array("i", sequence.tokens[first : first + size + 1]).tobytes()
            names.append(blake2b(text, key=names[-1] if names else root, digest_size=16).digest())
        return names
