"""Walks a round's outcome into a sequence, one token at a time (law 4).

Each token in turn meets EOS, the stop strings and the cap; the first that ends the request is the last that exists.
What lies behind it is neither emitted, nor counted, nor recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serving.engine.events import Delta
from serving.engine.recorder import TopK
from serving.engine.sequence import Sequence
from serving.spec.round import Candidate, Outcome
from shared.trace import Kind, Round


@dataclass(frozen=True)
class Gain:
    """What survived of a round."""

    delta: Delta
    tokens: int
    accepted: int
    tested: int
    ended: Literal["stop", "length"] | None


def commit(
    candidate: Candidate, outcome: Outcome, topk: TopK | None, version: str, eos_token_ids: frozenset[int]
) -> Gain:
    """Append the outcome's tokens to the sequence until one of them ends it."""
    sequence, gamma = candidate.sequence, candidate.gamma
    start = sequence.committed
    text: list[str] = []
    ended: Literal["stop", "length"] | None = None
    for index, token in enumerate(outcome.token_ids):
        sequence.tokens.append(token)
        if sequence.recorder is not None and topk is not None:
            kind = _kind(index, outcome, gamma)
            sequence.recorder.commit(start + index, kind, outcome.probs[index], topk, candidate.first + index)
        ended = _push(sequence, token, text, eos_token_ids)
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
    return Gain(Delta("".join(text), tuple(sequence.tokens[-tokens:])), tokens, accepted, tested, ended)


def _kind(index: int, outcome: Outcome, gamma: int) -> Kind:
    if index < outcome.accepted:
        return Kind.ACCEPTED
    if outcome.rejected is not None:
        return Kind.RECOVERED
    return Kind.BONUS if gamma else Kind.PLAIN


def _push(
    sequence: Sequence, token: int, text: list[str], eos_token_ids: frozenset[int]
) -> Literal["stop", "length"] | None:
    """The token's text, and whether it is the last."""
    params = sequence.request.params
    piece = sequence.detokenizer.push(token)
    text.append(piece.text)
    if piece.stopped:
        return "stop"
    ended: Literal["stop", "length"] | None = None
    if token in eos_token_ids and not params.ignore_eos:
        ended = "stop"
    elif sequence.remaining <= 0:
        ended = "length"
    if ended is not None:
        text.append(sequence.detokenizer.flush())
    return ended
