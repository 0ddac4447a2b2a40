"""Judging equals walking every possible round by hand, under every request's own filters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.evaluator import judge
from learner.example import Example
from shared.acceptance import replay
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.learner.records import VOCAB, random_example, random_record, tiny_head
from tests.learner.test_unroll import drafted_logits
from tests.oracle import penalised
from tests.tiny import build_tiny_model

GAMMA = 3
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=8, top_p=0.9),
    Sampling(temperature=1.3, min_p=0.1, seeded=True),
    Sampling(presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.5, logit_bias=((4, 3.0), (5, 1.0))),
]


@torch.no_grad()
def test_counts_equal_the_rounds_walked_by_hand() -> None:
    head = tiny_head(spread=0.15)
    examples = [
        random_example(seed, prompt=prompt, outputs=outputs, sampling=SAMPLINGS[seed % 4])
        for seed, (prompt, outputs) in enumerate([(6, 8), (1, 7), (9, 2), (4, 12), (3, 5), (2, 6)])
    ]
    found = judge(head, examples, GAMMA)
    draft_ids = head.draft_ids.tolist()
    for example, judged in zip(examples, found, strict=True):
        record = example.record
        n, prompt = len(record.output_ids), len(record.prompt_ids)
        acceptance = np.zeros((n - 1, GAMMA))
        for s in range(1, n):
            for j in range(min(GAMMA, n - s)):
                token = int(record.output_ids[s + j])
                if token not in draft_ids:
                    continue
                logits = drafted_logits(head, example, prompt + s - 2, j + 1)
                spread = torch.full((VOCAB,), -torch.inf).index_copy(0, head.draft_ids, logits)
                seen = record.output_ids[: s + j].tolist()
                logits = torch.tensor(penalised(spread.tolist(), record.sampling, record.prompt_ids.tolist(), seen))
                q = filtered_probs(logits.unsqueeze(0), record.sampling)[0, token]
                acceptance[s - 1, j] = min(1.0, float(q) / record.probs[s + j])
        expected = replay(acceptance)
        assert (judged.id, judged.domain, judged.seeded) == (record.id, "chat", record.sampling.seeded)
        assert judged.positions == n - 1
        assert judged.first == pytest.approx(acceptance[:, 0].sum(), abs=1e-4)
        assert judged.accepted == pytest.approx(expected.accepted, abs=2e-3)
        assert judged.tested == pytest.approx(expected.tested, abs=2e-3)
        assert judged.steps == pytest.approx(expected.steps, abs=2e-3)
    assert sum(judged.first for judged in found) > 1


def test_a_drafter_that_is_the_target_is_always_accepted(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, vocab=60)).eval()
    greedy = Sampling(temperature=0.0)
    examples = []
    for seed, sampling in enumerate([Sampling(), greedy, Sampling(temperature=0.5, top_k=20)]):
        record = random_record(seed, outputs=17, sampling=sampling)
        ids = record.prompt_ids.tolist()
        outputs, probs = [], []
        for _ in range(17):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1:]
            p = filtered_probs(logits, sampling)[0].detach()
            token = int(torch.multinomial(p, 1, generator=torch.Generator().manual_seed(len(ids))))
            outputs.append(token)
            probs.append(float(p[token]))
            ids.append(token)
        examples.append(
            Example(replace(record, output_ids=np.array(outputs, np.int32), probs=np.array(probs, np.float32)))
        )
    for judged in judge(model, examples, gamma=3):
        assert judged.first == pytest.approx(16, abs=1e-2)
        assert judged.tested == pytest.approx(judged.accepted, abs=1e-2)
        assert judged.steps == pytest.approx(4, abs=1e-2)  # 16 tokens, 3 accepted and a bonus each


def test_constrained_requests_are_not_judged() -> None:
    """Their masks are not in the record; they count as requests of no position."""
    head = tiny_head()
    free, bound = (random_example(0, sampling=Sampling(constrained=constrained)) for constrained in (False, True))
    judged = judge(head, [free, bound], GAMMA)
    assert judged[0].positions > 0
    assert (judged[1].positions, judged[1].first, judged[1].tested, judged[1].rounds_tested) == (0, 0.0, 0.0, 0.0)
    assert [j.constrained for j in judged] == [False, True]


def test_a_padded_vocabulary_is_masked_as_in_serving(tmp_path: Path) -> None:
    """Mass on ids that are no tokens would otherwise lower q."""
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, vocab=60, pad_vocab_to=128))
    examples = [Example(replace(random_record(0, outputs=30), probs=np.ones(30, np.float32)))]
    (open_,), (masked,) = judge(model, examples, 2), judge(model, examples, 2, token_count=60)
    assert masked.first > open_.first


def test_gamma_zero_and_single_tokens_are_counted_as_plain_steps() -> None:
    head = tiny_head()
    whole, single = random_example(0, outputs=6), random_example(1, outputs=1)
    plain, nothing = judge(head, [whole, single], 0)
    assert (plain.accepted, plain.tested, plain.steps) == (0.0, 0.0, 5.0)
    assert (nothing.positions, nothing.first, nothing.tested) == (0, 0.0, 0.0)
    assert judge(head, [], 2) == []
    assert judge(head, [random_example(0, prompt=1, outputs=1)], 2)[0].positions == 0


def test_judging_does_not_depend_on_company_and_leaves_the_mode_alone() -> None:
    head = tiny_head().train()
    examples = [random_example(seed, prompt=3 + seed, outputs=5 + seed) for seed in range(5)]
    together = judge(head, examples, GAMMA)
    assert head.training
    for example, judged in zip(examples, together, strict=True):
        (alone,) = judge(head, [example], GAMMA)
        assert alone.accepted == pytest.approx(judged.accepted, abs=1e-4)
    rough = judge(head, examples, GAMMA, bf16=True)
    assert sum(j.first for j in rough) == pytest.approx(sum(j.first for j in together), rel=0.05)
