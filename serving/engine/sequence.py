"""A request while it runs: its tokens, its blocks, and how far each cache has come.

Invariant between steps: the target's KV holds `kv_len` positions, all of them of committed tokens; a sequence that is
decoding has exactly one committed token that the target has not read yet. Rolling back is to leave `kv_len` alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from serving.engine.detokenize import Detokenizer
from serving.engine.events import TokenLogprob
from serving.engine.processing import Processing
from serving.engine.recorder import Recorder
from serving.engine.request import GenerationRequest
from serving.spec.noise import fresh_seed
from serving.spec.stats import StatsKeeper


@dataclass
class DraftState:
    """What the drafter keeps of a sequence; only the drafter writes it."""

    kv_len: int = 0  # positions in the drafter's KV that need no recomputation
    read_ahead: int = 0  # drafts of this round that the drafter has read beyond kv_len
    features: list[Tensor] = field(default_factory=list)  # [rows, layers * hidden] each, of positions from kv_len on
    version: str | None = ""  # that wrote every row so far; "": none is written; None: more than one did
    marked_blocks: int = 0  # full ones that the prefix cache has looked at


@dataclass(frozen=True)
class Held:
    """A committed token that is not delivered, since none of its text is shown yet."""

    token_id: int
    begin: int  # characters of the answer in front of its own
    logprob: TokenLogprob | None


class Sequence:
    """Mutable state of one accepted request."""

    def __init__(
        self,
        request: GenerationRequest,
        detokenizer: Detokenizer,
        recorder: Recorder | None,
        processing: Processing | None = None,
    ) -> None:
        self.request = request
        self.processing = processing
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.seed = request.params.seed if request.params.seed is not None else fresh_seed()
        self.table: list[int] = []
        self.kv_len = 0
        self.draft = DraftState()
        self.block_names: list[bytes] = []  # of the leading full blocks, as far as anybody asked
        self.kept_blocks = 0  # leading blocks that are named or came by their name
        self.place = 0  # in the order of arrival
        self.overtaken = 0  # times that a later request was let in before this one
        self.detokenizer = detokenizer
        self.recorder = recorder
        self.stats = StatsKeeper()
        self.held: deque[Held] = deque()
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = []  # where asked for; the first token was never predicted
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.arrived_at = time.monotonic()
        self.cancelled = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def committed(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that the cap still allows."""
        return self.request.params.max_tokens - self.committed

    @property
    def overdue(self) -> bool:
        """True when its deadline has passed."""
        deadline = self.request.params.deadline_s
        return deadline is not None and time.monotonic() - self.arrived_at >= deadline

    @property
    def decoding(self) -> bool:
        """True when one unread token is left, so that the next row's logits decide a new token."""
        return self.kv_len == len(self.tokens) - 1

    @property
    def coupled(self) -> bool:
        """Greedy and seeded requests verify by comparing picks; the others by rejection sampling."""
        return self.request.params.sampling.greedy or self.request.params.seed is not None

    def forget_cache(self) -> None:
        """Preemption: everything is computed again later. The caller has released the blocks."""
        assert not self.table, "release the blocks before forgetting them"
        self.kv_len = self.kept_blocks = 0
        self.draft = DraftState()
