"""Requests with every parameter there is, dealt in turns or drawn by hypothesis, and what they must agree on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from hypothesis import strategies as st

from serving.batch import Answer
from serving.engine.request import GenerationRequest, Grammar
from shared.trace import Sampling
from tests.oracle import Reference
from tests.tiny_engine import request

TIE = 1e-3  # of a logit: law 6
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "k": {"enum": ["on", "off"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("regex", "([a-f]{1,6} ){1,9}"),
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("lark", 'start: word ("," word)*\nword: /[a-z]{2,5}/'),
    Grammar("json_object"),
)
BIAS = ((40, 6.0), (70, 5.0), (90, -100.0), (2, -1.5))
PROCESSING: tuple[dict[str, object], ...] = (
    {},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.3, "presence_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": BIAS},
    {"repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": BIAS},
)
FILTERS: tuple[dict[str, float], ...] = (
    {"temperature": 0.7},
    {"top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.02},
)
LIMITS: tuple[dict[str, object], ...] = (
    {},
    {"min_tokens": 6, "stop_token_ids": tuple(range(100, 140))},
    {"stop": ("e", " th")},
    {"stop_token_ids": tuple(range(200, 240)), "logprobs": 2},
    {"grammar": GRAMMARS[0]},
    {"grammar": GRAMMARS[1], "logprobs": 0},
    {"stop": ("in", "a"), "min_tokens": 3},
    {"grammar": GRAMMARS[2], "min_tokens": 5},
    {"grammar": GRAMMARS[3], "ignore_eos": True},
)


def mixed_requests(vocab: int, count: int, *, turn: int = 0) -> list[GenerationRequest]:
    """Greedy, seeded and unseeded ones in turns; the lists above have coprime lengths, so all meet all.

    `turn` deals the gammas anew.
    """
    noise = torch.Generator().manual_seed(12)
    found = []
    for i in range(count):
        length = int(torch.randint(1, 40, (1,), generator=noise))
        prompt = torch.randint(3, vocab, (length,), generator=noise).tolist()
        kind = i % 3
        chosen: dict[str, object] = {**PROCESSING[i % 7], **(FILTERS[i % 4] if kind else {"temperature": 0.0})}
        sampling = Sampling(**chosen, seeded=kind == 1)  # type: ignore[arg-type]
        limits = {"ignore_eos": False, **LIMITS[i // 3 % 9]}
        seed = 500 + i if kind == 1 else None
        domain = f"g{(i + turn) % 5}"
        found.append(request(f"r{i}", prompt, sampling, seed=seed, domain=domain, max_tokens=9 + i % 3, **limits))  # type: ignore[arg-type]
    return found


@st.composite
def any_requests(draw: st.DrawFn, vocab: int) -> list[GenerationRequest]:
    """One to five requests that share a batch."""
    found = []
    for i in range(draw(st.integers(1, 5))):
        chosen = {
            "temperature": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.6])),
            "top_k": draw(st.sampled_from([0, 0, 1, 7, 50])),
            "top_p": draw(st.sampled_from([1.0, 1.0, 0.9, 0.4])),
            "min_p": draw(st.sampled_from([0.0, 0.0, 0.05])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.0, -1.0, 2.0])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.0, -0.5, 1.5])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.7, 1.8])),
            "logit_bias": draw(st.sampled_from([(), BIAS, ((5, 3.0),)])),
        }
        seed = draw(st.sampled_from([None, 3, 2**62 - 1]))
        limits = draw(st.sampled_from(LIMITS))
        prompt = draw(st.lists(st.integers(3, vocab - 1), min_size=1, max_size=24))
        sampling = Sampling(**chosen, seeded=seed is not None)
        more = {"ignore_eos": draw(st.booleans()), **limits}
        domain = f"g{draw(st.integers(0, 4))}"
        cap = draw(st.integers(6, 12))
        found.append(request(f"r{i}", prompt, sampling, seed=seed, domain=domain, max_tokens=cap, **more))  # type: ignore[arg-type]
    return found


def determined(asked: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Those that have but one right answer."""
    return [r for r in asked if r.params.sampling.greedy or r.params.seed is not None]


def check_equal(
    reference: Reference,
    asked: Sequence[GenerationRequest],
    answers: Mapping[str, Answer],
    plain: Mapping[str, Answer],
) -> None:
    """Tokens, text and ending are those of the plain path, but for a tie, which the reference must confirm."""
    ties = 0
    for r in determined(asked):
        answer, alone = answers[r.id], plain[r.id]
        if answer.token_ids != alone.token_ids:
            ties += 1
            gap = max(reference.gaps(r, answer.token_ids))
            assert gap < TIE, f"{r} leaves the reference by {gap}: {answer.token_ids} against {alone.token_ids}"
            continue
        assert answer.text == alone.text, r
        assert answer.ending.reason == alone.ending.reason, r
        assert answer.ending.stop_reason == alone.ending.stop_reason, r
    assert ties <= 1, "ties are rare in these models: a run full of them would hide what it should show"
