"""Laws 1, 2 and 4: sampled answers keep the target's joint distribution under each parameter that changes or cuts it.

Each case's requests run in one mixed batch with all others'; the exact joint distribution is enumerated text by text
from the dense reference and the plain-Python oracle. A grammar is enumerated along its own masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from serving.engine.request import GenerationRequest, Grammar
from shared.processing import Contexts, History
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.laws.chi_square import ALARM, p_value
from tests.oracle import Reference
from tests.tiny import END_ID
from tests.tiny_engine import Bench, GammaByDomain, request, serve

PROMPT, TOKENS, TRIALS = (5, 9, 3, 12), 3, 600
STOP_ID = 7
CASES: dict[str, tuple[Sampling, dict[str, object]]] = {
    "temperature": (Sampling(temperature=0.6), {}),
    "top_k": (Sampling(top_k=5), {}),
    "top_p": (Sampling(temperature=1.4, top_p=0.8), {}),
    "min_p": (Sampling(min_p=0.1), {}),
    "presence": (Sampling(temperature=1.2, presence_penalty=3.0), {}),
    "frequency": (Sampling(frequency_penalty=-2.5), {}),
    "repetition": (Sampling(repetition_penalty=3.0, top_k=9), {}),
    "bias": (Sampling(logit_bias=((4, 2.0), (11, -3.0))), {}),
    "min_tokens": (Sampling(), {"min_tokens": 2}),
    "stop id": (Sampling(), {"stop_token_ids": (STOP_ID,)}),
    "stop string": (Sampling(temperature=1.5), {"stop": ("w4",)}),
    "cap": (Sampling(temperature=0.8), {"max_tokens": 2}),
}


@pytest.fixture(autouse=True)
def counted_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = count(0xABCDE)
    monkeypatch.setattr("serving.engine.sequence.fresh_seed", lambda: next(seeds))


def trials(name: str) -> list[GenerationRequest]:
    sampling, limits = CASES[name]
    more = {"max_tokens": TOKENS, "ignore_eos": False, **limits}
    return [request(f"{name}.{i}", PROMPT, sampling, domain=f"g{(2, 2, 1, 2)[i % 4]}", **more) for i in range(TRIALS)]  # type: ignore[arg-type]


def ends(bench: Bench, asked: GenerationRequest, output: Sequence[int]) -> bool:
    params, decode = asked.params, bench.reference.tokenizer.decode
    return (
        len(output) >= params.max_tokens
        or bool({END_ID, *params.stop_token_ids} & set(output))
        or any(stop in decode(list(output)) for stop in params.stop)
    )


def joint(reference: Reference, asked: GenerationRequest) -> dict[tuple[int, ...], float]:
    """The exact chance of every answer."""
    found: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        outputs = list(open_)
        logits = reference.bench.dense_logits(torch.tensor([[*PROMPT, *output] for output in outputs]))[:, -1]
        rows = torch.stack([reference.row(x, asked, output) for x, output in zip(logits, outputs, strict=True)])
        probs = filtered_probs(rows, asked.params.sampling).double()
        grown: dict[tuple[int, ...], float] = {}
        for output, row in zip(outputs, probs, strict=True):
            for token in row.nonzero().flatten().tolist():
                text = (*output, token)
                over = ends(reference.bench, asked, text)
                (found if over else grown)[text] = open_[output] * float(row[token])
        open_ = grown
    return found


def _repeats(text: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(token in text[:place]) for place, token in enumerate(text))


def p_values(exact: dict[tuple[int, ...], float], answers: Sequence[tuple[int, ...]]) -> list[float]:
    """Of whole answers, of what follows the first token, which is where drafts are, and of what is said again."""
    found = []
    for view in (lambda text: text, lambda text: text[1:], _repeats):
        chances: Counter[tuple[int, ...]] = Counter()
        for text, chance in exact.items():
            chances[view(text)] += chance  # type: ignore[assignment]
        counts = Counter(view(answer) for answer in answers)
        assert set(counts) <= set(chances), "an answer that the target never gives"
        if len(chances) < 2:
            continue
        p = np.array(list(chances.values()))
        found.append(p_value(np.array([counts[text] for text in chances]), p / p.sum()))
    return found


@pytest.mark.parametrize("kind", ["eagle3", "model", "contrary", "point_mass"])
def test_each_parameter_keeps_the_joint_distribution(small_bench: Bench, kind: str) -> None:
    """Three of the twelve cases for each kind, so that every case meets one; the crowd is the other cases."""
    start = ["eagle3", "model", "contrary", "point_mass"].index(kind)
    names = list(CASES)[start::4]
    reference, target = Reference(small_bench), small_bench.target(blocks=512, block_size=4)
    groups = [trials(name) for name in names]
    mixed = [r for together in zip(*groups, strict=True) for r in together]
    answers, engine = serve(
        target, small_bench.drafter(kind, target), mixed, GammaByDomain(), max_batch=48, prefill_tokens=4096
    )
    assert engine.counters.total("tested") > TRIALS
    for name, group in zip(names, groups, strict=True):
        found = p_values(joint(reference, group[0]), [answers[r.id].token_ids for r in group])
        assert min(found) > ALARM, name


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_grammar_keeps_the_joint_distribution(bench: Bench, kind: str) -> None:
    """The head lacks a third of the tokens, so some masks leave it nothing: there it stops drafting."""
    sampling = Sampling(temperature=1.5, presence_penalty=0.5)
    grammar = Grammar("regex", "[a-d]{1,4}[xy]?")
    asked = [
        request(
            f"r{i}", PROMPT, sampling, domain=f"g{(3, 2, 1)[i % 3]}", max_tokens=4, ignore_eos=False, grammar=grammar
        )
        for i in range(500)
    ]
    reference, target = Reference(bench), bench.target(blocks=512, block_size=4)
    answers, engine = serve(target, bench.drafter(kind, target), asked, GammaByDomain(), max_batch=48)
    exact: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        grown: dict[tuple[int, ...], float] = {}
        for output, chance in open_.items():
            row = reference.row(bench.dense_logits([*PROMPT, *output])[-1], asked[0], output)
            p = filtered_probs(row[None], sampling)[0].double()
            for token in p.nonzero().flatten().tolist():
                text = (*output, token)
                follow = set() if token == END_ID else reference.allowed(grammar, text, ignore_eos=False)
                over = len(text) == 4 or follow <= {END_ID}
                (exact if over else grown)[text] = chance * float(p[token])
        open_ = grown
    accepted, tested = engine.counters.alpha_counts()
    assert 0 < accepted < tested
    assert min(p_values(exact, [answers[r.id].token_ids for r in asked])) > ALARM


def test_the_test_has_teeth(small_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty that does not see the drafts before a draft, in p and q alike."""
    contexts = History.contexts

    def blind(self: History, ahead: Sequence[int], device: torch.device | None = None) -> Contexts:
        seen = contexts(self, ahead, device)
        return replace(seen, counts=seen.counts[:1].expand_as(seen.counts))

    monkeypatch.setattr(History, "contexts", blind)
    reference, target = Reference(small_bench), small_bench.target(blocks=512, block_size=4)
    asked = trials("presence")
    answers, _ = serve(target, small_bench.drafter("model", target), asked, GammaByDomain(), max_batch=48)
    assert min(p_values(joint(reference, asked[0]), [answers[r.id].token_ids for r in asked])) < ALARM / 100
