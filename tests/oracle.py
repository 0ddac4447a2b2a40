"""What a request's parameters mean, in plain Python, one row at a time: shares no line with the product.

The order is that of `shared.processing`'s docstring; grammars are walked afresh from the first token for every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from serving.engine.request import GenerationRequest, Grammar
from serving.spec.noise import gumbel
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.tiny_engine import Bench


def penalised(logits: Sequence[float], s: Sampling, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Bias and penalties of one row."""
    found = list(logits)
    for token, amount in s.logit_bias:
        found[token] += amount
    for token in {*prompt, *output}:
        found[token] = found[token] / s.repetition_penalty if found[token] > 0 else found[token] * s.repetition_penalty
    for token in set(output):
        found[token] -= s.frequency_penalty * list(output).count(token) + s.presence_penalty
    return found


class Reference:
    """The answers that a bench's target gives, told from its dense logits alone."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.eos = bench.reference.eos_token_ids
        self._vocabulary = from_tokenizer(bench.reference.tokenizer) if bench.vocab > 256 else None

    def allowed(self, grammar: Grammar, output: Sequence[int], *, ignore_eos: bool) -> set[int]:
        source = {
            "json_object": lambda: LLMatcher.grammar_from_json_schema('{"type": "object"}'),
            "json_schema": lambda: LLMatcher.grammar_from_json_schema(grammar.text),
            "regex": lambda: LLMatcher.grammar_from_regex(grammar.text),
            "lark": lambda: LLMatcher.grammar_from_lark(grammar.text),
        }[grammar.kind]()
        matcher = LLMatcher(self._vocabulary, source)
        assert matcher.consume_tokens(list(output)), f"{list(output)} is not in the grammar"
        bits = matcher.compute_bitmask()
        found = {token for token in range(self.bench.vocab) if bits[token // 8] >> token % 8 & 1}
        return found - self.eos if ignore_eos and found - self.eos else found

    def row(self, logits: Tensor, asked: GenerationRequest, output: Sequence[int]) -> Tensor:  # [vocab] -> [vocab]
        """Before temperature and filters."""
        params = asked.params
        found = penalised(logits.tolist(), params.sampling, asked.prompt_ids, output)
        allowed = set(range(self.bench.vocab))
        if params.grammar is not None:
            allowed = self.allowed(params.grammar, output, ignore_eos=params.ignore_eos)
        if len(output) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
            allowed = allowed - ends or allowed
        return torch.tensor([x if token in allowed else -math.inf for token, x in enumerate(found)])

    def gaps(self, asked: GenerationRequest, output: Sequence[int]) -> list[float]:
        """By how much of a logit each token misses the pick of a greedy or seeded request."""
        sampling, text = asked.params.sampling, [*asked.prompt_ids, *output]
        logits = self.bench.dense_logits(text)
        found = []
        for place, token in enumerate(output):
            scores = self.row(logits[len(asked.prompt_ids) + place - 1], asked, output[:place])
            unit = 1.0
            if not sampling.greedy:
                assert asked.params.seed is not None
                noise = gumbel(asked.params.seed, [place], len(scores), scores.device)[0]
                scores, unit = filtered_probs(scores[None], sampling)[0].log() + noise, sampling.temperature
            found.append(float(scores.max() - scores[token]) * unit)
        return found
