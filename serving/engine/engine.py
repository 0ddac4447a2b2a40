"""One step of the engine: schedule, draft, forward, decide, commit.

Owns nothing but the order of these five and their counters; the scheduler owns blocks, the drafter its state, each
sequence its tokens. A drafter may be exchanged only between two calls of `step`. Not thread-safe: one thread steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serving.drafters.base import Drafter, DraftJob
from serving.engine.commit import commit, last_words
from serving.engine.detokenize import Detokenizer
from serving.engine.events import Ending, EndReason, Event, FailureCode
from serving.engine.feature_pool import FeaturePool
from serving.engine.grammar import compile_grammar
from serving.engine.kv import BlockAllocator
from serving.engine.logprobs import PromptRows
from serving.engine.prefix import PrefixCache
from serving.engine.processing import Processing
from serving.engine.recorder import Recorder, TopK
from serving.engine.request import GenerationRequest, check_params
from serving.engine.scheduler import Scheduler, Work
from serving.engine.sequence import Sequence
from serving.spec.draft import Draft
from serving.spec.gamma import Asking, GammaController
from serving.spec.round import Candidate, decide
from shared.counters import Counters
from shared.errors import RequestError
from shared.live_alpha import add_request
from shared.models.paged import PagedModel, Segment
from shared.trace import TraceRecord

_USUAL_BACKLOG = 16  # unread positions a request with which drafting is timed; more is the start of drafting
Listener = Callable[[Sequence, Event], None]
TraceSink = Callable[[TraceRecord, Tensor | None], None]  # must not block; called on the stepping thread


@dataclass(frozen=True)
class Limits:
    """What this engine can hold."""

    max_context: int  # positions of one sequence, prompt and output
    max_batch: int
    prefill_tokens: int
    prefix_cache: bool = True  # requests that begin alike share the blocks of their beginning


@dataclass(frozen=True)
class Tracing:
    """What is recorded, and where it goes."""

    sink: TraceSink
    replica: str
    topk: int
    position_share: float
    wants_features: Callable[[GenerationRequest], bool]
    wants_trace: Callable[[GenerationRequest], bool] = lambda _request: True


class Engine:
    """Continuous batching with speculation over one target and at most one drafter."""

    def __init__(
        self,
        target: PagedModel,
        drafter: Drafter | None,
        controller: GammaController,
        limits: Limits,
        listener: Listener,
        tracing: Tracing | None = None,
    ) -> None:
        self.target, self.drafter, self.controller, self.limits = target, drafter, controller, limits
        self.allocator = BlockAllocator(target.kv.num_blocks, target.kv.block_size)
        self.prefix = self._prefix_cache() if limits.prefix_cache else None
        self.scheduler = Scheduler(
            self.allocator, max_batch=limits.max_batch, prefill_tokens=limits.prefill_tokens, prefix=self.prefix
        )
        self.counters = Counters()
        self.domains: dict[str, None] = {}  # served so far, in order of their first
        self._listener, self._tracing = listener, tracing

    def _prefix_cache(self) -> PrefixCache:
        blocks, size = self.allocator.num_blocks, self.allocator.block_size
        features = FeaturePool(blocks, size) if self.target.feature_layers else None
        return PrefixCache(self.allocator, self.drafter, features)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, with the numbers, for a request that can never fit or cannot be processed."""
        prompt, cap = len(request.prompt_ids), request.params.max_tokens
        if not prompt:
            raise RequestError("The prompt is empty. Send at least one token.", param="prompt", code="empty_prompt")
        room = min(self.limits.max_context, self.allocator.num_blocks * self.allocator.block_size)
        if prompt + cap > room:
            remedy = (
                f"Shorten the prompt to at most {room - 1}."
                if prompt >= room
                else f"Shorten the prompt or lower max_tokens to {room - prompt}."
            )
            raise RequestError(
                f"This model serves {room} tokens of context, but {prompt + cap} were asked for: {prompt} in the "
                f"prompt and {cap} to generate. {remedy}",
                param="prompt" if prompt >= room else "max_tokens",
                code="context_length_exceeded",
            )
        bad = [token for token in request.prompt_ids if not 0 <= token < self.target.loaded.token_count]
        if bad:
            raise RequestError(f"Token id {bad[0]} is not in the vocabulary.", param="prompt")
        check_params(request.params, self.target.loaded.token_count)
        if request.params.grammar is not None:
            compile_grammar(self.target.loaded.tokenizer, request.params.grammar)

    def add(self, request: GenerationRequest) -> Sequence:
        """Queue a request that `check` has passed."""
        loaded, params = self.target.loaded, request.params
        eos = frozenset() if params.ignore_eos else loaded.eos_token_ids
        grammar = None
        if params.grammar is not None:
            compiled = compile_grammar(loaded.tokenizer, params.grammar)
            grammar = compiled.start(loaded.eos_token_ids, ignore_eos=params.ignore_eos)
        ends = eos | frozenset(params.stop_token_ids)
        detokenizer = Detokenizer(loaded.tokenizer, params.stop, ends)
        processing = Processing.of(request, ends, grammar)
        sequence = Sequence(request, detokenizer, self._recorder(request), processing)
        self.scheduler.add(sequence)
        return sequence

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def step(self) -> None:
        """One round for everybody who can run."""
        started = time.perf_counter()
        self._drop_ended()
        self.scheduler.admit()
        works = self.scheduler.plan(self._gammas())
        if not works:
            return
        planned = time.perf_counter()
        backlog = sum(_backlog(work.sequence) for work in works if work.gamma)
        drafts = self._draft(works)
        drafted = time.perf_counter()
        candidates, logits, features = self._forward(works, drafts)
        read = time.perf_counter()
        self._commit(works, candidates, logits, features)
        done = time.perf_counter()
        for name, seconds in (
            ("schedule_s", planned - started),
            ("draft_s", drafted - planned),
            ("verify_s", read - drafted),
            ("sample_s", done - read),
        ):
            self.counters.add(name, seconds)
        decoding = all(work.count == 1 for work in works)  # prompts cost otherwise: few of their rows are decided
        if decoding:
            rows = len(works) + sum(draft.gamma for draft in drafts.values())
            self.controller.costs.add_target(len(works), rows, done - drafted)
        if drafts and backlog <= _USUAL_BACKLOG * len(drafts):
            depth = max(draft.gamma for draft in drafts.values())
            self.controller.costs.add_draft(len(drafts), depth, drafted - planned)
            if decoding:
                self._time(depth, drafted - planned, read - drafted)

    def end(self, sequence: Sequence, reason: EndReason, message: str = "", code: FailureCode | None = None) -> None:
        """The one place where a request ends (law 9): blocks freed, text flushed, trace handed over, listener told."""
        self.scheduler.remove(sequence)
        outcome = {"cancelled": "requests_cancelled", "failed": "requests_failed"}.get(reason, "requests_finished")
        self.counters.add(outcome)
        gamma_max = self.controller.most if self.drafter is not None else 0
        ending = Ending(
            reason,
            sequence.prompt_len,
            sequence.committed,
            sequence.stats.view(gamma_max),
            message,
            sequence.stop_reason,
            tuple(sequence.prompt_logprobs),
            code,
        )
        if sequence.request.params.speculative:
            for version, (steps, accepted, tested) in sequence.stats.by_version.items():
                add_request(
                    self.counters, sequence.request.domain, version, steps=steps, accepted=accepted, tested=tested
                )
        if sequence.recorder is not None and self._tracing is not None and sequence.committed:
            self._tracing.sink(*sequence.recorder.finish(sequence.tokens))
        self._listener(sequence, ending)

    def fail_all(self, message: str) -> None:
        """A step broke: everybody in the engine ends as failed, and every block is free again."""
        for sequence in list(self.scheduler):
            self.end(sequence, "failed", message, "internal_error")

    def _recorder(self, request: GenerationRequest) -> Recorder | None:
        if self._tracing is None or not self._tracing.wants_trace(request):
            return None
        features = bool(self.target.feature_layers) and self._tracing.wants_features(request)
        fingerprint = self.target.loaded.fingerprint
        return Recorder(request, fingerprint, self._tracing.replica, features, self._tracing.position_share)

    def _drop_ended(self) -> None:
        """Those whom nobody waits for any more, and those whose time is up."""
        for sequence in [sequence for sequence in self.scheduler if sequence.cancelled or sequence.overdue]:
            if sequence.cancelled:
                self.end(sequence, "cancelled", "the client went away")
                continue
            delta = last_words(sequence)
            if delta.text or delta.token_ids:
                self._listener(sequence, delta)
            limit = sequence.request.params.deadline_s
            self.end(sequence, "deadline", f"the deadline of {limit:g} s passed after {sequence.committed} tokens")

    def _gammas(self) -> dict[str, int]:
        drafter = self.drafter
        if drafter is None:
            return {}
        # The first token comes from the prompt's own forward: before it, a head may not have a single feature to read.
        able = [s for s in self.scheduler.running if s.decoding and s.committed and s.request.params.speculative]
        room = min(self.limits.max_context, drafter.max_positions)
        asking = [
            Asking(s.request.domain, min(s.remaining - 1, room - len(s.tokens)), s.stats.recent, _backlog(s))
            for s in able
        ]
        plain = sum(1 for s in self.scheduler.running if s.decoding) - len(able)
        gammas = self.controller.choose(asking, plain=plain)
        return {sequence.id: gamma for sequence, gamma in zip(able, gammas, strict=True)}

    def _draft(self, works: list[Work]) -> dict[str, Draft]:
        jobs = [DraftJob(work.sequence, work.gamma, work.sequence.stats.recent.least) for work in works if work.gamma]
        if not jobs or self.drafter is None:
            return {}
        if self.prefix is not None:
            for job in jobs:
                self.prefix.before_draft(job.sequence)
        drafts = self.drafter.propose(jobs)
        if self.prefix is not None:
            for job in jobs:
                self.prefix.after_draft(job.sequence, self.drafter.version)
        return {job.sequence.id: draft for job, draft in zip(jobs, drafts, strict=True) if draft.gamma}

    def _forward(self, works: list[Work], drafts: dict[str, Draft]) -> tuple[list[Candidate], Tensor, Tensor | None]:
        """The target reads every work's tokens and drafts; logits only of rows that decide or are asked for."""
        token_ids: list[int] = []
        segments: list[Segment] = []
        select: list[int] = []
        candidates: list[Candidate] = []
        prompts = PromptRows()
        for work in works:
            sequence, draft = work.sequence, drafts.get(work.sequence.id)
            prompts.add(sequence, work.count, len(token_ids))
            token_ids += sequence.tokens[sequence.kv_len : sequence.kv_len + work.count]
            token_ids += draft.token_ids if draft else ()
            gamma = draft.gamma if draft else 0
            segments.append(Segment(sequence.table, sequence.kv_len, work.count + gamma))
            if work.decides:
                candidates.append(Candidate(sequence, draft, len(select)))
                select.extend(range(len(token_ids) - 1 - gamma, len(token_ids)))
        if not prompts.rows:
            output = self.target.forward(token_ids, segments, select)
            logits = output.logits
        else:
            wanted = sorted([*select, *prompts.rows])  # the model takes rows in this order only
            output = self.target.forward(token_ids, segments, wanted)
            place = {row: index for index, row in enumerate(wanted)}
            prompts.take(output.logits[[place[row] for row in prompts.rows]])
            logits = output.logits[[place[row] for row in select]]
        if self.prefix is not None:
            self.prefix.store(segments, output.features)
        return candidates, logits, output.features

    def _commit(self, works: list[Work], candidates: list[Candidate], logits: Tensor, features: Tensor | None) -> None:
        outcomes = decide(candidates, logits) if candidates else []
        decided = {c.sequence.id: (c, outcome) for c, outcome in zip(candidates, outcomes, strict=True)}
        topk = None
        recorded = [(c, o) for c, o in decided.values() if c.sequence.recorder is not None]
        if self._tracing is not None and recorded:
            kept = [row for c, o in recorded for row in range(c.first, c.first + len(o.token_ids))]
            topk = TopK.of(logits, self._tracing.topk, kept)
        first = 0
        for work in works:
            sequence = work.sequence
            candidate, outcome = decided.get(sequence.id, (None, None))
            gamma = candidate.gamma if candidate else 0
            accepted = outcome.accepted if outcome else 0
            rows = work.count + accepted  # what the target read for good
            read = features[first : first + rows] if features is not None else None
            first += work.count + gamma
            sequence.kv_len += rows
            if self.drafter is not None:
                self.drafter.commit(sequence, accepted, read)
            if sequence.recorder is not None and read is not None:
                sequence.recorder.read(read)
            if candidate is None or outcome is None:
                self._keep(sequence)
                continue
            version = self.drafter.version if self.drafter is not None else ""
            gain = commit(candidate, outcome, topk, version, self.target.loaded.eos_token_ids, logits)
            self._keep(sequence)
            self._count(sequence, gamma, gain.accepted, gain.tested, gain.tokens, version)
            if candidate.draft is not None and candidate.draft.chance is not None:
                self.controller.observe_chance(candidate.draft.chance, outcome.accepted == gamma)
            if gain.delta.text or gain.delta.token_ids:
                self._listener(sequence, gain.delta)
            if gain.ended is not None:
                self.end(sequence, gain.ended, gain.message, gain.code)

    def _time(self, depth: int, draft_s: float, verify_s: float) -> None:
        """What this version's drafts cost beside the target's own forward, which no version changes."""
        version = self.drafter.version if self.drafter is not None else ""
        for name, value in (("rounds", 1), ("levels", depth), ("draft_s", draft_s), ("verify_s", verify_s)):
            self.counters.add(f"timed.{name}", value, version=version)

    def _keep(self, sequence: Sequence) -> None:
        if self.prefix is not None:
            self.prefix.keep(sequence)

    def _count(self, sequence: Sequence, gamma: int, accepted: int, tested: int, emitted: int, version: str) -> None:
        domain, add = sequence.request.domain, self.counters.add
        self.domains[domain] = None
        add("steps", domain=domain)
        add(f"gamma_at.{gamma}")
        add("emitted", emitted, domain=domain)
        if not gamma:
            return
        self.controller.observe(domain, accepted, tested, sequence.stats.recent)
        for name, value in (("spec_steps", 1), ("drafted", gamma), ("tested", tested), ("accepted", accepted)):
            add(name, value, domain=domain, version=version)
        for depth in range(tested):
            add(f"tested_at.{depth + 1}")
            if depth < accepted:
                add(f"accepted_at.{depth + 1}")


def _backlog(sequence: Sequence) -> int:
    """Positions that the drafter has not read."""
    return sequence.kv_len - sequence.draft.kv_len
