"""A differential test: greedy answers under each parameter are those of transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from shared.trace import Sampling
from tests.laws.mixtures import BIAS
from tests.tiny import END_ID
from tests.tiny_engine import Bench, GammaByDomain, request, serve

CAP, PROMPTS = 16, 8
FILTERED = {"top_k": 5, "top_p": 0.7, "min_p": 0.1}  # none of these changes the largest logit


class Counted(LogitsProcessor):
    """OpenAI's two penalties, which transformers lacks, as one of its processors."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids[:, self._prompt :], torch.ones_like(scores))
        return scores - self._frequency * counts - self._presence * (counts > 0)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: sampling, other parameters, arguments of `generate`
    "nothing": ({}, {}, {}),
    "filters": (FILTERED, {}, {}),
    "repetition": ({"repetition_penalty": 1.5}, {}, {"repetition_penalty": 1.5}),
    "bias": ({"logit_bias": BIAS}, {}, {"sequence_bias": [[[token], amount] for token, amount in BIAS]}),
    "bias and repetition": (
        {"logit_bias": BIAS, "repetition_penalty": 1.2},
        {},
        {"repetition_penalty": 1.2, "sequence_bias": [[[token], amount] for token, amount in BIAS]},
    ),
    "min_tokens": (
        {"logit_bias": ((END_ID, 30.0),)},
        {"min_tokens": 9},
        {"min_new_tokens": 9, "sequence_bias": [[[END_ID], 30.0]]},
    ),
    "stop ids": ({}, {"stop_token_ids": tuple(range(60, 120))}, {"eos_token_id": [END_ID, *range(60, 120)]}),
    "frequency": ({"frequency_penalty": 1.1}, {}, {}),
    "presence": ({"presence_penalty": 1.7, "frequency_penalty": -0.2}, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_equal_those_of_generate(bench: Bench, name: str) -> None:
    chosen, limits, arguments = CASES[name]
    noise = torch.Generator().manual_seed(8)
    prompts = [torch.randint(3, bench.vocab, (3 + 4 * i,), generator=noise).tolist() for i in range(PROMPTS)]
    sampling = Sampling(temperature=0.0, **chosen)
    asked = [
        request(f"r{i}", prompt, sampling, domain=f"g{1 + i % 4}", max_tokens=CAP, ignore_eos=False, **limits)
        for i, prompt in enumerate(prompts)
    ]
    target = bench.target()
    answers, engine = serve(target, bench.drafter("eagle3", target), asked, GammaByDomain())
    assert engine.counters.total("accepted") > 0
    for r, prompt in zip(asked, prompts, strict=True):
        settings = {"eos_token_id": END_ID, "pad_token_id": 0, "max_new_tokens": CAP, "do_sample": False, **arguments}
        penalties = Counted(len(prompt), sampling.frequency_penalty, sampling.presence_penalty)
        with torch.inference_mode():
            text = bench.reference.model.generate(  # type: ignore[operator]
                torch.tensor([prompt]),
                generation_config=GenerationConfig(**settings),
                logits_processor=LogitsProcessorList([penalties]),
            )
        assert list(answers[r.id].token_ids) == text[0, len(prompt) :].tolist(), r
