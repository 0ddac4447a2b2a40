"""Grammars that an answer must obey: compiled once, then walked along one request's tokens.

Owns the one door to llguidance: of the kept libraries it is the one that takes JSON schemas, regular expressions and
Lark grammars alike, with nothing to install beside it. A state is advanced by committed tokens only; what would be
allowed behind drafts is asked of a copy, so a rejection leaves nothing to undo.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from serving.engine.events import Failure
from serving.engine.request import Grammar
from shared.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT = 64  # compiled grammars; a service has few, and compiling takes milliseconds
_PARAM = "response_format"
_lock = threading.Lock()
_vocabularies: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()


class GrammarState:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: LLMatcher, end: int, eos_token_ids: frozenset[int], *, ignore_eos: bool) -> None:
        self._matcher, self._end, self._ignore_eos = matcher, end, ignore_eos
        self._eos = sorted(eos_token_ids | {end})
        self._ahead: list[int] = []  # tokens that `_scout` has walked beyond the committed ones
        self._masks: list[Tensor | None] = []  # in front of each token of `_ahead` and behind the last
        self._scout: LLMatcher | None = None
        self.finished = False  # nothing can follow
        self.failure: Failure | None = None  # why the grammar can be followed no further

    def push(self, token: int) -> None:
        """One committed token. Any end of the text is the grammar's end."""
        self._scout, self._ahead, self._masks = None, [], []
        if self.finished or self.failure:
            return
        taken = self._matcher.consume_token(self._end if token in self._eos else token)
        if self._matcher.is_error():
            self.failure = _lost(self._matcher)
        elif not taken:  # a mask let it through
            self.failure = Failure("internal_error", f"token {token} was committed against the grammar")
        self.finished = not self.failure and bool(self._matcher.is_stopped())

    def masks(self, ahead: Sequence[int]) -> list[Tensor | None]:  # [tokens] bool each
        """What may follow each beginning of `ahead`, the empty one first.

        None stands where nothing is decided any more: behind the end, or behind a token that may not be there.
        """
        walked = len(self._ahead)
        if self._scout is None or list(ahead[:walked]) != self._ahead:
            self._scout, self._ahead, self._masks = self._matcher.deep_copy(), [], []
            self._masks.append(self._mask(self._scout))
        for token in ahead[len(self._ahead) :]:
            self._ahead.append(token)
            self._masks.append(self._step(self._scout, token))
        return self._masks[: len(ahead) + 1]

    def _step(self, scout: LLMatcher, token: int) -> Tensor | None:
        if self._masks[-1] is None or token in self._eos or not scout.validate_tokens([token]):
            return None
        scout.consume_token(token)
        return None if scout.is_stopped() else self._mask(scout)

    def _mask(self, matcher: LLMatcher) -> Tensor | None:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if matcher.is_error():
            self.failure = _lost(matcher)
            return None
        allowed = torch.from_numpy(bits.view(np.bool_).copy())
        may_end = bool(allowed[self._end])
        allowed[self._eos] = False
        if may_end and not (self._ignore_eos and bool(allowed.any())):
            allowed[self._eos] = True
        return allowed


class CompiledGrammar:
    """A grammar over one tokenizer's tokens."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher, self._end = matcher, end

    def start(self, eos_token_ids: frozenset[int], *, ignore_eos: bool) -> GrammarState:
        """A state at the beginning. With `ignore_eos` the text ends where the grammar leaves nothing else."""
        return GrammarState(self._matcher.deep_copy(), self._end, eos_token_ids, ignore_eos=ignore_eos)


def compile_grammar(tokenizer: PreTrainedTokenizerBase, grammar: Grammar) -> CompiledGrammar:
    """Compiled, or remembered from before; from any thread. The first call for a tokenizer takes a second or more.

    Raises RequestError for a grammar that is wrong or uses what is not supported, and for a tokenizer whose tokens
    are not bytes of text.
    """
    with _lock:  # not while compiling: a costly grammar holds up nobody else
        vocabulary = _vocabularies.get(tokenizer)
        if vocabulary is None:
            vocabulary = _vocabularies[tokenizer] = _vocabulary(tokenizer)
    return _compiled(vocabulary, grammar)


def _vocabulary(tokenizer: Any) -> LLTokenizer:
    if tokenizer.eos_token_id is None:
        raise RequestError("This model has no end-of-text token, which grammars need.", param=_PARAM)
    try:
        return from_tokenizer(tokenizer)
    except ValueError as error:
        message = f"This model's tokenizer cannot follow a grammar ({error}). Ask without one."
        raise RequestError(message, param=_PARAM) from error


@lru_cache(_KEPT)
def _compiled(vocabulary: LLTokenizer, grammar: Grammar) -> CompiledGrammar:
    try:
        source = _source(grammar)
        wrong, complaints = LLMatcher.validate_grammar_with_warnings(source, vocabulary)
    except ValueError as error:
        wrong, complaints = True, [str(error)]
    matcher = None if wrong else LLMatcher(vocabulary, source, log_level=0)
    problem = "; ".join(complaints) if matcher is None else _problem(matcher)
    if matcher is None or problem:
        kind = grammar.kind.replace("_", " ")
        raise RequestError(f"The {kind} cannot be followed: {problem.strip()}", param=_PARAM, code="invalid_grammar")
    return CompiledGrammar(matcher, int(vocabulary.eos_token))


def _problem(matcher: LLMatcher) -> str:
    """Why not even a first token can be found, or nothing: some grammars have no sentence at all."""
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    return _reason(first) if first.is_error() else ""


def _lost(matcher: LLMatcher) -> Failure:
    """Some grammars compile, and outgrow the library's limits only behind some text."""
    return Failure("invalid_grammar", f"The grammar cannot be followed any further: {_reason(matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """The library's message without its dump of the parser."""
    return str(matcher.get_error()).partition("\n<state>")[0].strip() or "it leaves no token to go on with"


def _source(grammar: Grammar) -> str:
    """The library's own form. Raises ValueError for a schema that is no JSON object."""
    match grammar.kind:
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        case "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is a JSON object")
            return str(LLMatcher.grammar_from_json_schema(grammar.text))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.text))
