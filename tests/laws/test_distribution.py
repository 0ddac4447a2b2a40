"""Laws 1 and 2 through the whole engine: sampled answers have exactly the target's joint distribution.

Thousands of unseeded requests run in mixed batches; the joint counts of their tokens are compared with the product of
the reference's conditionals after the request's own filters, the end of the text included. Seeds come from a counter,
so that a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, cycle, islice

import numpy as np
import pytest
import torch

from serving.engine.request import GenerationRequest
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.laws.chi_square import ALARM, p_value
from tests.tiny import END_ID
from tests.tiny_engine import KINDS, Bench, GammaByDomain, request, serve

TOKENS = 4  # the first comes from the prompt; from then on there is room for two drafts
PROMPT = (5, 9, 3, 12)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_k=6),
    Sampling(temperature=1.5, top_p=0.85),
    Sampling(temperature=1.2, min_p=0.08),
)
TRIALS = 1000  # for each of a kind's two samplings


@pytest.fixture(autouse=True)
def counted_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = count(0x5EED)
    monkeypatch.setattr("serving.engine.sequence.fresh_seed", lambda: next(seeds))


def joint(bench: Bench, sampling: Sampling) -> np.ndarray:  # [vocab ** TOKENS], a text that has ended goes on as END
    """The exact distribution of answers, by enumerating every text."""
    vocab = bench.vocab
    found = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    for _ in range(TOKENS):
        ended = (texts[:, len(PROMPT) :] == END_ID).any(1)
        p = filtered_probs(bench.dense_logits(texts)[:, -1], sampling).double()
        p[ended] = torch.nn.functional.one_hot(torch.tensor(END_ID), vocab).double()
        found = (found[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]], 1)
    return found.numpy()


def cell(tokens: Sequence[int], vocab: int) -> int:
    padded = [*tokens, *[END_ID] * (TOKENS - len(tokens))]
    return sum(token * vocab**place for place, token in enumerate(reversed(padded)))


def trials(sampling: Sampling, name: str, number: int) -> list[GenerationRequest]:
    """Unseeded requests that draft two, one or no tokens; ids start with `name`."""
    return [
        request(
            f"{name}.{i}", PROMPT, sampling, domain=f"g{(2, 2, 1, 2, 0)[i % 5]}", max_tokens=TOKENS, ignore_eos=False
        )
        for i in range(number)
    ]


def others() -> list[GenerationRequest]:
    """Greedy, seeded and longer requests between them."""
    return [
        request("greedy", (4, 4, 7), domain="g2", max_tokens=9),
        request("seeded", (7, 3), Sampling(top_k=4, seeded=True), seed=1, domain="g2", max_tokens=6),
        request("long", tuple(range(3, 15)) * 3, Sampling(), domain="g1", max_tokens=5),
    ]


def mixed(*groups: list[GenerationRequest]) -> list[GenerationRequest]:
    """In turns, with a stranger after every eleventh."""
    found: list[GenerationRequest] = []
    crowd = cycle(others())
    for turn, r in enumerate(r for together in zip(*groups, strict=True) for r in together):
        found.append(r)
        if turn % 11 == 0:
            stranger = next(crowd)
            found.append(
                GenerationRequest(f"{stranger.id}.{turn}", stranger.prompt_ids, stranger.params, stranger.domain)
            )
    return found


def observed(bench: Bench, kind: str, groups: Sequence[list[GenerationRequest]]) -> list[np.ndarray]:
    target = bench.target(blocks=512, block_size=4)
    drafter = bench.drafter(kind, target)
    answers, _ = serve(target, drafter, mixed(*groups), GammaByDomain(), max_batch=48, prefill_tokens=4096)
    return [
        np.bincount([cell(answers[r.id].token_ids, bench.vocab) for r in group], minlength=bench.vocab**TOKENS)
        for group in groups
    ]


@pytest.mark.parametrize(("index", "kind"), list(enumerate(KINDS)), ids=KINDS)
def test_answers_have_the_targets_joint_distribution(small_bench: Bench, index: int, kind: str) -> None:
    chosen = list(islice(cycle(SAMPLINGS), index, index + 2))
    counts = observed(small_bench, kind, [trials(s, f"t{i}", TRIALS) for i, s in enumerate(chosen)])
    for sampling, found in zip(chosen, counts, strict=True):
        exact = joint(small_bench, sampling)
        assert p_value(found, exact) > ALARM, sampling
        for pair in ((0, 1), (2, 3)):  # positions 1 and 2 can be drafted together; the rest is summed out
            assert p_value(_pair(found, pair), _pair(exact, pair)) > ALARM, (sampling, pair)


def _pair(cells: np.ndarray, summed: tuple[int, int]) -> np.ndarray:
    return cells.reshape((16,) * TOKENS).sum(axis=summed).flatten()


@pytest.mark.parametrize("kind", ["lying", "picky"])
def test_the_test_has_teeth(small_bench: Bench, kind: str) -> None:
    (found,) = observed(small_bench, kind, [trials(Sampling(), "t", 2 * TRIALS)])
    assert (
        min(p_value(_pair(found, p), _pair(joint(small_bench, Sampling()), p)) for p in ((0, 1), (0, 3))) < ALARM / 100
    )
