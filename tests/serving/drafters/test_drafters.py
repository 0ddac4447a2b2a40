"""What each drafter kind promises beyond the laws: its limits, its versions, and the distribution that it names."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from serving.drafters.base import Drafter, DraftJob
from serving.drafters.eagle3 import Eagle3Drafter
from serving.drafters.model import ModelDrafter, check_same_tokens
from serving.engine.engine import Engine, Limits
from serving.spec.draft import Draft
from serving.spec.noise import gumbel
from shared.errors import ConfigError
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel, load_model
from shared.sampling import filtered_probs
from shared.trace import Sampling
from tests.fakes_graphs import Repeat
from tests.tiny import build_tiny_model
from tests.tiny_engine import DRAFTING, Bench, attend_causally, fixed_gamma, outputs, request, serve

SAMPLED = Sampling(temperature=0.8, top_p=0.95)


def first_drafts(
    bench: Bench, kind: str, sampling: Sampling | None, seed: int | None, gamma: int
) -> tuple[Draft, list[int]]:
    """What a fresh drafter proposes after a prompt and its first token, and that text."""
    target = bench.target()
    drafter = bench.drafter(kind, target)
    assert drafter is not None
    engine = Engine(target, drafter, fixed_gamma(0), Limits(512, 1, 512), lambda *_: None)
    sequence = engine.add(request("r", range(20, 45), sampling, seed=seed, max_tokens=30))
    engine.step()
    (draft,) = drafter.propose([DraftJob(sequence, gamma)])
    return draft, list(sequence.tokens)


@pytest.mark.parametrize("kind", DRAFTING)
def test_greedy_and_seeded_drafts_are_point_masses_and_sampled_ones_name_their_q(bench: Bench, kind: str) -> None:
    for sampling, seed in ((None, None), (replace(SAMPLED, seeded=True), 3)):
        draft, _ = first_drafts(bench, kind, sampling, seed, 3)
        assert draft.probs is None
        assert draft.version == "base"
    draft, _ = first_drafts(bench, kind, SAMPLED, None, 3)
    assert draft.parents == tuple(range(-1, draft.gamma - 1))
    if kind == "point_mass":
        assert draft.probs is None
        return
    assert draft.probs is not None
    assert draft.probs.shape == (draft.gamma, bench.vocab)
    torch.testing.assert_close(draft.probs.sum(1), torch.ones(draft.gamma))
    assert (draft.probs[range(draft.gamma), list(draft.token_ids)] > 0).all(), "q of what q drew"


# --- each against a dense computation of its own ---------------------------------------------------------------


def head_logits(bench: Bench, drafter: Eagle3Drafter, text: list[int], depth: int) -> torch.Tensor:  # [draft_vocab]
    """Logits of the draft after `text`, of which the last `depth` tokens are drafts of this round."""
    head, known = bench.heads[drafter.version], len(text) - depth
    with torch.inference_mode():
        ids = torch.tensor([text])
        features = torch.cat(outputs(bench.reference, ids[:, : known - 1], (0, 1)), dim=-1)
        fused = head.fuse(features)
        for _ in range(depth + 1):
            rows = fused.shape[1]
            hidden = head(ids[:, 1 : rows + 1], fused, torch.arange(rows)[None], attend_causally)
            fused = torch.cat([fused, hidden[:, -1:]], dim=1)
        return head.logits(hidden[0, -1])


@pytest.mark.parametrize("seed", [None, 11], ids=["greedy", "seeded"])
def test_the_head_drafts_what_a_dense_pass_over_the_text_says(bench: Bench, seed: int | None) -> None:
    sampling = None if seed is None else replace(SAMPLED, seeded=True)
    draft, text = first_drafts(bench, "eagle3", sampling, seed, 4)
    drafter = bench.drafter("eagle3", bench.target())
    assert isinstance(drafter, Eagle3Drafter)
    for depth, token in enumerate(draft.token_ids):
        logits = head_logits(bench, drafter, [*text, *draft.token_ids[:depth]], depth)
        if sampling is not None:
            # The noise of a head's row is that of the target id which the row stands for.
            noise = gumbel(seed, [1 + depth], bench.vocab, torch.device("cpu"))[0, drafter.head.draft_ids]
            logits = filtered_probs(logits[None], sampling)[0].log() + noise
        assert token == int(drafter.head.draft_ids[logits.argmax()])


def test_a_heads_q_lies_on_its_draft_vocabulary_after_the_requests_filters(bench: Bench) -> None:
    draft, text = first_drafts(bench, "eagle3", SAMPLED, None, 3)
    drafter = bench.drafter("eagle3", bench.target())
    assert isinstance(drafter, Eagle3Drafter)
    assert draft.probs is not None
    for depth in range(draft.gamma):
        logits = head_logits(bench, drafter, [*text, *draft.token_ids[:depth]], depth)
        expected = torch.zeros(bench.vocab)
        expected[drafter.head.draft_ids] = filtered_probs(logits[None], SAMPLED)[0]
        torch.testing.assert_close(draft.probs[depth], expected, rtol=1e-3, atol=1e-5)


@torch.inference_mode()
def test_a_models_q_is_its_own_distribution_after_the_requests_filters(bench: Bench) -> None:
    drafter = bench.drafter("model", bench.target())
    assert isinstance(drafter, ModelDrafter)
    assert drafter.model.loaded.vocab_size > bench.vocab, "padded wider than the target"
    draft, text = first_drafts(bench, "model", SAMPLED, None, 3)
    assert draft.probs is not None
    dense = drafter.model.loaded.model
    dense.set_attn_implementation("sdpa")
    for depth in range(draft.gamma):
        logits = dense(torch.tensor([[*text, *draft.token_ids[:depth]]])).logits[0, -1, : bench.vocab]
        torch.testing.assert_close(draft.probs[depth], filtered_probs(logits[None], SAMPLED)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("wider", [True, False])
def test_widths_are_fitted_both_ways(tmp_path: Path, wider: bool) -> None:
    widths = (320, 352) if wider else (352, 320)
    loaded = [
        load_model(
            str(build_tiny_model(tmp_path / f"{width}", vocab=300, pad_vocab_to=width)),
            home=tmp_path,
            device="cpu",
            weights="fp32",
        )
        for width in widths
    ]
    target = PagedModel(loaded[0], PagedKV(16, 16))
    drafter = ModelDrafter(PagedModel(loaded[1], PagedKV(16, 16)), "base", vocab_size=loaded[0].vocab_size)
    asked = [request(f"r{i}", [5, 6, 7 + i], Sampling() if i else None, max_tokens=20) for i in range(3)]
    answers, engine = serve(target, drafter, asked, fixed_gamma(3))
    assert engine.counters.total("drafted") > 0
    assert max(token for answer in answers.values() for token in answer.token_ids) < 300


# --- edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("prompt", [1, 2])
@pytest.mark.parametrize("company", [0, 2])
def test_the_shortest_prompts(bench: Bench, kind: str, prompt: int, company: int) -> None:
    """Before its first token is read, a request has no feature at all."""
    target = bench.target()
    asked = [request(f"r{i}", [9 + i] * (prompt if i == company else 30), max_tokens=12) for i in range(company + 1)]
    answers, _ = serve(target, bench.drafter(kind, target), asked, fixed_gamma(3))
    plain, _ = serve(bench.target(), None, asked, fixed_gamma(0))
    assert {id: a.token_ids for id, a in answers.items()} == {id: a.token_ids for id, a in plain.items()}


@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("budget", [4, 5, 29, 30])
def test_a_prompt_whose_last_piece_is_one_token(bench: Bench, kind: str, budget: int) -> None:
    """Prompt pieces of any size, one left over among them; nothing is drafted before the first token is there."""
    target = bench.target()
    records = []

    def between(engine: Engine) -> None:
        records.extend(s.stats.spec_steps for s in engine.scheduler.running if s.committed <= 1)

    asked = [request("r", range(10, 40), max_tokens=10), request("s", range(50, 81), max_tokens=10)]
    answers, _ = serve(
        target, bench.drafter(kind, target), asked, fixed_gamma(2), prefill_tokens=budget, between=between
    )
    plain, _ = serve(bench.target(), None, asked, fixed_gamma(0))
    assert [answers[id].token_ids for id in "rs"] == [plain[id].token_ids for id in "rs"]
    assert not any(records)


@pytest.mark.parametrize("kind", DRAFTING)
def test_nobody_drafts_beyond_the_drafters_or_the_contexts_end(bench: Bench, kind: str) -> None:
    target = bench.target(block_size=4)
    drafter = bench.drafter(kind, target)
    assert drafter is not None
    drafter.max_positions = 30
    beyond = count()

    def between(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            if len(sequence.tokens) > 34:
                next(beyond)

    asked = [request("r", range(10, 30), max_tokens=28)]  # 48 positions in all: the context's last one is used
    answers, engine = serve(target, drafter, asked, fixed_gamma(4), max_context=48, between=between)
    plain, _ = serve(bench.target(), None, asked, fixed_gamma(0))
    assert answers["r"].token_ids == plain["r"].token_ids
    assert next(beyond) > 10, "the rest was decoded plainly"
    assert engine.counters.total("spec_steps") > 0


def test_a_target_in_half_precision_feeds_a_head_in_float32(bench: Bench) -> None:
    """As on CUDA, where the features come in bfloat16."""
    target = bench.target()
    target.loaded.model.to(torch.bfloat16)
    drafter = bench.drafter("eagle3", target)
    asked = [request(f"r{i}", range(10 + i, 30), Sampling() if i else None, max_tokens=12) for i in range(2)]
    answers, engine = serve(target, drafter, asked, fixed_gamma(2))
    assert all(len(answer.token_ids) == 12 for answer in answers.values())
    assert engine.counters.total("drafted") > 0


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_swap_keeps_the_caches_and_names_the_new_version(bench: Bench, kind: str) -> None:
    target = bench.target()
    drafter = bench.drafter(kind, target)
    before = _pools(drafter)
    bench.swap(drafter)
    assert drafter is not None
    assert drafter.version == "v1"
    assert _pools(drafter) is before


def _pools(drafter: Drafter | None) -> PagedKV:
    assert isinstance(drafter, Eagle3Drafter | ModelDrafter)
    return drafter._kv if isinstance(drafter, Eagle3Drafter) else drafter.model.kv


# --- a drafter must speak the target's language ----------------------------------------------------------------


def loaded(folder: Path, home: Path) -> LoadedModel:
    return load_model(str(folder), home=home, device="cpu", weights="fp32")


def test_the_same_tokenizer_is_accepted_whatever_the_padding(tmp_path: Path) -> None:
    one = build_tiny_model(tmp_path / "one", vocab=300)
    two = build_tiny_model(tmp_path / "two", vocab=300, pad_vocab_to=384, hidden=16)
    check_same_tokens(loaded(one, tmp_path), loaded(two, tmp_path))


def test_another_vocabulary_is_refused_with_a_token_that_differs(tmp_path: Path) -> None:
    one, two = (build_tiny_model(tmp_path / f"{vocab}", vocab=vocab) for vocab in (300, 310))
    with pytest.raises(ConfigError, match=r"drafter.model: its tokenizer differs .* \(310 and 300 tokens\)"):
        check_same_tokens(loaded(one, tmp_path), loaded(two, tmp_path))


def test_two_tokens_that_traded_places_are_noticed(tmp_path: Path) -> None:
    one = build_tiny_model(tmp_path / "one", vocab=40)
    two = shutil.copytree(one, tmp_path / "two")
    file = two / "tokenizer.json"
    text = file.read_text()
    assert '"w5": 8' in text
    file.write_text(text.replace('"w5": 8', '"w5": 9').replace('"w6": 9', '"w6": 8'))
    with pytest.raises(ConfigError, match=r"'w[56]' has id [89] in the drafter and [89] in the target"):
        check_same_tokens(loaded(one, tmp_path), loaded(two, tmp_path))


def test_other_special_tokens_are_refused(tmp_path: Path) -> None:
    one = build_tiny_model(tmp_path / "one", vocab=40)
    two = shutil.copytree(one, tmp_path / "two")
    settings = two / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token": "<|end|>"', '"eos_token": "w7"'))
    with pytest.raises(ConfigError, match="special ids"):
        check_same_tokens(loaded(one, tmp_path), loaded(two, tmp_path))


def test_a_head_whose_steps_are_recorded_drafts_the_same_before_and_after_a_swap(bench: Bench) -> None:
    """A swap copies into the tensors that the recorded steps read."""
    answers = []
    for recorder in (None, Repeat()):
        target = bench.target()
        drafter = bench.drafter("eagle3", target, recorder=recorder)
        before = drafter.head if isinstance(drafter, Eagle3Drafter) else None
        steps = 0

        def swap(_: object, drafter: Drafter | None = drafter) -> None:
            nonlocal steps
            steps += 1
            if steps == 6:
                bench.swap(drafter)

        asked = [request(f"r{i}", range(3 + i, 12 + 3 * i), max_tokens=24) for i in range(3)]
        found, engine = serve(target, drafter, asked, fixed_gamma(3), between=swap)
        if isinstance(recorder, Repeat) and isinstance(drafter, Eagle3Drafter):
            assert recorder.records > 0
            assert drafter.head is before
        accepted, _ = engine.counters.alpha_counts()
        answers.append(({id: answer.token_ids for id, answer in found.items()}, accepted))
    assert answers[0] == answers[1]
    assert answers[0][1] > 0
