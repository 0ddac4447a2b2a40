"""Walks a round's outcome into a sequence, one token at a time (law 4).

Each token in turn meets the grammar, EOS, the stop ids, the stop strings and the cap; the first that ends the request
is the last that exists. What lies behind it is neither emitted, nor counted, nor recorded. A token is delivered with
the first character of its text: what a stop string takes back whole was never said.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serving.engine.events import Delta, EndReason, FailureCode, TokenLogprob
from serving.engine.logprobs import token_logprobs
from serving.engine.recorder import TopK
from serving.engine.sequence import Held, Sequence
from serving.spec.round import Candidate, Outcome
from shared.trace import Kind, Round


@dataclass(frozen=True)
class Gain:
    """What survived of a round."""

    delta: Delta
    tokens: int
    accepted: int
    tested: int
    ended: EndReason | None
    message: str = ""
    code: FailureCode | None = None


def commit(
    candidate: Candidate,
    outcome: Outcome,
    topk: TopK | None,
    version: str,
    eos_token_ids: frozenset[int],
    logits: Tensor | None = None,  # [rows, vocab] of the step, raw; needed when the request asks for log-probabilities
) -> Gain:
    """Append the outcome's tokens to the sequence until one of them ends it."""
    sequence, gamma = candidate.sequence, candidate.gamma
    grammar = sequence.processing.grammar if sequence.processing is not None else None
    if grammar is not None and grammar.failure:  # the rows of this round were not masked
        return Gain(Delta("", ()), 0, 0, 0, "failed", grammar.failure.message, grammar.failure.code)
    start = sequence.committed
    logprobs = _logprobs(candidate, outcome, logits)
    text: list[str] = []
    ended: EndReason | None = None
    for index, token in enumerate(outcome.token_ids):
        sequence.tokens.append(token)
        if sequence.recorder is not None and topk is not None:
            kind = _kind(index, outcome, gamma)
            sequence.recorder.commit(start + index, kind, outcome.probs[index], topk, candidate.first + index)
        ended = _push(sequence, token, logprobs[index] if logprobs else None, text, eos_token_ids)
        if ended is not None:
            break
    tokens = sequence.committed - start
    accepted = min(outcome.accepted, tokens)
    # A rejection was reached only if everything before it survived.
    rejected = outcome.rejected if tokens > outcome.accepted else None
    tested = accepted + (1 if rejected else 0)
    sequence.stats.add(drafted=gamma, accepted=accepted, tested=tested, version=version)
    if sequence.recorder is not None:
        drafted = candidate.draft.token_ids if candidate.draft else ()
        sequence.recorder.rounds.append(Round(start, version if gamma else "", drafted, accepted, tested))
        if rejected is not None:
            sequence.recorder.reject(start + accepted, *rejected)
    everything = ended is not None and not isinstance(sequence.stop_reason, str)
    return Gain(deliver(sequence, "".join(text), everything=everything), tokens, accepted, tested, ended)


def deliver(sequence: Sequence, text: str, *, everything: bool) -> Delta:
    """`text`, which its detokenizer has just shown, with the held tokens that it shows something of."""
    held, shown = sequence.held, sequence.detokenizer.shown
    due = []
    while held and (everything or held[0].begin < shown):
        due.append(held.popleft())
    logprobs = tuple(item.logprob for item in due if item.logprob is not None)
    return Delta(text, tuple(item.token_id for item in due), logprobs)


def last_words(sequence: Sequence) -> Delta:
    """Everything that was held back, of a request that ends without another round."""
    return deliver(sequence, sequence.detokenizer.flush(), everything=True)


def _logprobs(candidate: Candidate, outcome: Outcome, logits: Tensor | None) -> list[TokenLogprob]:
    top = candidate.sequence.request.params.logprobs
    if top is None or logits is None:
        return []
    rows = logits[candidate.first : candidate.first + len(outcome.token_ids)]
    return token_logprobs(rows, outcome.token_ids, top)


def _kind(index: int, outcome: Outcome, gamma: int) -> Kind:
    if index < outcome.accepted:
        return Kind.ACCEPTED
    if outcome.rejected is not None:
        return Kind.RECOVERED
    return Kind.BONUS if gamma else Kind.PLAIN


def _push(
    sequence: Sequence, token: int, logprob: TokenLogprob | None, text: list[str], eos_token_ids: frozenset[int]
) -> EndReason | None:
    """The token's text, and how it ends the request if it does."""
    params, detokenizer = sequence.request.params, sequence.detokenizer
    sequence.held.append(Held(token, detokenizer.decoded, logprob))
    finished = False
    if sequence.processing is not None:
        sequence.processing.push(token)
        grammar = sequence.processing.grammar
        finished = grammar is not None and grammar.finished
    piece = detokenizer.push(token, stoppable=sequence.committed > params.min_tokens)
    text.append(piece.text)
    if piece.stop is not None:
        sequence.stop_reason = piece.stop
        return "stop"
    ended: EndReason | None = None
    if token in params.stop_token_ids:
        sequence.stop_reason = token
        ended = "stop"
    elif finished or (token in eos_token_ids and not params.ignore_eos):
        ended = "stop"
    elif sequence.remaining <= 0:
        ended = "length"
    if ended is not None:
        text.append(detokenizer.flush())
    return ended
