"""The order of processing against a plain-Python oracle and against the processors of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.processing import History, Vocabulary, processed
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.oracle import penalised

VOCAB = 40
PROMPT, OUTPUT = [3, 9, 9, 30, 12], [9, 7, 7, 39, 3, 7]
EVERYTHING = Sampling(
    presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.6, logit_bias=((7, 2.5), (30, -100.0), (0, 1.0))
)
CASES = [
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=0.9),
    Sampling(repetition_penalty=1.4),
    Sampling(repetition_penalty=0.7),
    Sampling(logit_bias=((5, 4.0), (9, -3.0))),
    EVERYTHING,
]


def rows(count: int = len(OUTPUT) + 1) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2)) * 3


@pytest.mark.parametrize("s", CASES, ids=str)
def test_every_row_equals_the_definition(s: Sampling) -> None:
    """Row j sees the prompt and j tokens of the output."""
    logits = rows()
    found = processed(logits, s, contexts=History(PROMPT).contexts(OUTPUT))
    for j, row in enumerate(logits.tolist()):
        torch.testing.assert_close(found[j], torch.tensor(penalised(row, s, PROMPT, OUTPUT[:j])))


def test_tokens_ahead_count_like_pushed_ones() -> None:
    for split in range(len(OUTPUT) + 1):
        history = History(PROMPT)
        for token in OUTPUT[:split]:
            history.push(token)
        ahead = processed(rows()[split:], EVERYTHING, contexts=history.contexts(OUTPUT[split:]))
        whole = processed(rows(), EVERYTHING, contexts=History(PROMPT).contexts(OUTPUT))
        torch.testing.assert_close(ahead, whole[split:])


def test_a_heads_columns_are_processed_by_what_they_stand_for() -> None:
    ids = torch.tensor([0, 3, 7, 8, 30, 38])  # neither 9 nor 39, which were said
    logits, contexts = rows(), History(PROMPT).contexts(OUTPUT)
    allowed = torch.rand(len(logits), VOCAB, generator=torch.Generator().manual_seed(1)) < 0.5
    head = processed(logits[:, ids], EVERYTHING, allowed=allowed, contexts=contexts, vocabulary=Vocabulary.of(ids))
    assert torch.equal(head, processed(logits, EVERYTHING, allowed=allowed, contexts=contexts)[:, ids])


def test_what_is_masked_stays_masked_and_the_input_stays_as_it_was() -> None:
    logits = rows()
    logits[:, 35:] = float("-inf")  # padding
    before = logits.clone()
    allowed = torch.ones(len(logits), 30, dtype=torch.bool)  # narrower than the vocabulary: the rest is not allowed
    allowed[:, 7] = False
    found = processed(logits, EVERYTHING, allowed=allowed, contexts=History(PROMPT).contexts(OUTPUT))
    assert torch.equal(logits, before)
    assert (found[:, [7, *range(30, 40)]] == float("-inf")).all()
    assert torch.isfinite(found[:, :7]).all()


class Counted(LogitsProcessor):
    """The penalties that transformers does not have, written as one of its processors."""

    def __init__(self, prompt: int, sampling: Sampling) -> None:
        self._prompt, self._sampling = prompt, sampling

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids[:, self._prompt :], torch.ones_like(scores))
        s = self._sampling
        return scores - s.frequency_penalty * counts - s.presence_penalty * (counts > 0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}], ids=str
)
@pytest.mark.parametrize("s", CASES, ids=str)
def test_equals_the_processors_of_transformers(s: Sampling, filters: dict[str, float], temperature: float) -> None:
    """Bias, then repetition, then counts, then min_new_tokens, then the warpers, as `generate` chains them."""
    logits, text = rows(1), torch.tensor([[*PROMPT, *OUTPUT]])
    chain = LogitsProcessorList()
    if s.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): amount for token, amount in s.logit_bias}))
    chain.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    chain.append(Counted(len(PROMPT), s))
    chain.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), len(OUTPUT) + 1, [2, 14]))
    chain.append(TemperatureLogitsWarper(temperature))
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in filters:
            chain.append(warper(filters[name]))
    expected = chain(text, logits.clone()).softmax(-1)
    allowed = torch.ones(1, VOCAB, dtype=torch.bool)
    allowed[:, [2, 14]] = False
    contexts = History(PROMPT).contexts(OUTPUT).since(len(OUTPUT))
    found = processed(logits, s, allowed=allowed, contexts=contexts)
    sampling = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
    torch.testing.assert_close(filtered_probs(found, sampling), expected)
