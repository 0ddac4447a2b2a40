"""Contenders that load a model, on a tiny one: what they count is what they did."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.bench_arrivals import feed_at, poisson
from ops.bench_drafters import own_config
from ops.bench_engine import OwnEngine
from ops.bench_line_up import Contender
from ops.bench_llama import LlamaCpp
from ops.bench_steps import StepWatch
from ops.bench_transformers import TransformersGenerate
from ops.bench_weights import linear_bytes
from serving.engine.request import GenerationRequest
from shared.artifact import Artifact, Manifest, load_folder, save_folder
from shared.config import Config, config_from_flat
from shared.models.eagle3 import Eagle3Config, Eagle3Head
from shared.models.target import load_model
from tests.ops.bench_fakes import job
from tests.tiny import build_tiny_model

TOKENS = 12
PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "another", "and a longer third")]
PLAIN = Contender("plain", "redraft", "fp32", "0")
JOB = job(ignore_eos=True, conversations=PROMPTS, max_tokens=TOKENS, batch=3)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("bench")
    target = build_tiny_model(root / "target")
    loaded = load_model(str(target), home=root, weights="fp32")
    shape = Eagle3Config(
        target_hidden=32,
        feature_layers=(0, 1),
        hidden=32,
        intermediate=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        draft_vocab=200,
        max_positions=512,
    )
    torch.manual_seed(3)
    head = Eagle3Head(shape, loaded.model.get_input_embeddings().weight)
    manifest = Manifest("base", "eagle3", "full", target=loaded.fingerprint, config=shape.to_dict())
    save_folder(Artifact(manifest, head.state_dict()), root / "head")
    return config_from_flat(
        {
            "home": str(root),
            "target.model": str(target),
            "target.device": "cpu",
            "drafter.model": str(root / "head"),
            "engine.prefix_cache": False,
        }
    )


def own(contender: Contender, config: Config, folder: Path, **changes: Any) -> OwnEngine:
    return OwnEngine(contender, own_config(contender, config, folder), {**JOB, **changes})


@pytest.fixture
def drafting(config: Config, tmp_path: Path) -> Iterator[OwnEngine]:
    engine = own(Contender("two", "redraft", "fp32", "2"), config, tmp_path)
    yield engine
    engine.stop()


def test_plain_decoding_is_counted_step_by_step(config: Config, tmp_path: Path) -> None:
    engine = own(PLAIN, config, tmp_path)
    assert engine.facts["drafter"] == "none"
    measure = engine.run(PROMPTS, "chat", TOKENS)
    # All prompts are read in the first step, which gives each its first token; each step after gives one more.
    assert measure.tokens == measure.steps == 3 * TOKENS
    assert measure.forwards == TOKENS
    assert (measure.decode.forwards, measure.decode.steps, measure.decode.tokens) == (11, 33, 33)
    assert measure.drafted_lengths == {"0": 3 * TOKENS}
    assert 0 < measure.decode.model_s < measure.decode.seconds < measure.seconds
    assert {"schedule", "draft", "verify", "sample", "detokenize"} <= measure.phases.keys()
    assert [len(times) for times in (measure.times.ttft_s, measure.times.itl_s, measure.times.gaps_s)] == [3, 3, 33]
    assert engine.run(PROMPTS, "chat", TOKENS).tokens == measure.tokens  # nothing is left of the call before


def test_a_prompt_that_is_read_in_parts_is_no_decoding(config: Config, tmp_path: Path) -> None:
    wordy = [[{"role": "user", "content": "word " * 60}]]
    engine = own(PLAIN, config, tmp_path, conversations=wordy)
    measure = engine.run(wordy, "chat", TOKENS)
    assert measure.forwards > TOKENS
    assert measure.decode.forwards == TOKENS - 1


def test_drafts_are_counted_and_tokens_are_the_same(drafting: OwnEngine) -> None:
    measure = drafting.run(PROMPTS, "chat", TOKENS)
    assert drafting.facts["drafter"] == "eagle3"
    assert measure.tokens == 3 * TOKENS
    assert measure.tokens == measure.steps + measure.accepted
    assert 0 < measure.tested <= measure.drafted
    assert sum(measure.drafted_lengths.values()) == measure.steps
    assert sum(int(length) * steps for length, steps in measure.drafted_lengths.items()) == measure.drafted
    assert measure.decode.drafted == measure.drafted  # a prompt's own step drafts nothing
    assert measure.decode.phases["draft"] > 0


def test_a_useless_head_costs_the_same_and_drafts_nonsense(config: Config, tmp_path: Path) -> None:
    changed = own_config(Contender("useless", "redraft", "fp32", "auto", "useless"), config, tmp_path / "head")
    assert changed.drafter.gamma == "auto"
    good, _ = load_folder(Path(config.drafter.model))
    useless, _ = load_folder(Path(changed.drafter.model))
    assert useless.manifest == good.manifest
    for name, tensor in good.tensors.items():
        same = torch.equal(useless.tensors[name], tensor)
        assert same == (name != "lm_head.weight"), name
    rows = [sorted(map(tuple, head.tensors["lm_head.weight"].tolist())) for head in (good, useless)]
    assert rows[0] == rows[1]


def test_a_gamma_beyond_the_configured_most_is_really_drafted(config: Config, tmp_path: Path) -> None:
    changed = own_config(Contender("x", "redraft", "fp32", "9"), config, tmp_path)
    assert (changed.drafter.gamma, changed.drafter.gamma_max) == (9, 9)


def test_with_traces_a_call_lasts_until_redis_has_them(config: Config, tmp_path: Path, redis_url: str) -> None:
    engine = own(Contender("traces", "redraft", "fp32", "2", redis=redis_url), config, tmp_path)
    try:
        engine.run(PROMPTS, "chat", TOKENS)
        store, publisher = engine._store, engine._publisher
        assert store is not None
        assert publisher is not None
        assert (publisher.published, publisher.dropped) == (3, 0)
        assert store.stream_depth().length == 3
    finally:
        engine.stop()


def test_a_swap_is_timed_between_two_steps(drafting: OwnEngine) -> None:
    found = drafting.swap(PROMPTS, "chat", TOKENS)
    assert all(seconds > 0 for seconds in found.values())
    assert drafting._slot is not None
    assert drafting._slot.drafter.version.startswith("bench-")


def test_requests_that_arrive_later_are_waited_for_from_then_on(drafting: OwnEngine) -> None:
    due = [0.0, 0.05, 0.4]
    measure = drafting.load(PROMPTS, "chat", TOKENS, due)
    assert measure.seconds > due[-1]
    assert measure.tokens == 3 * TOKENS
    assert len(measure.times.ttft_s) == 3
    assert min(measure.times.ttft_s) > 0
    # Idle time is in the call, but in no step.
    assert measure.decode.seconds < measure.seconds


def test_an_idle_engine_sleeps_until_the_next_arrival() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    watch = StepWatch(SimpleNamespace(counters=SimpleNamespace(fields={})), clock=lambda: now[0])  # type: ignore[arg-type]
    requests = [GenerationRequest(str(index), (1,)) for index in range(2)]
    feed = feed_at(requests, [0.0, 3.0], idle=lambda: bool(now[0]), watch=watch, sleep=sleep)
    assert next(feed) is requests[0]
    assert next(feed) is None  # busy, and nothing has come
    now[0] = 1.0
    assert next(feed) is requests[1]
    assert slept == [2.0]


def test_arrivals_come_at_the_rate_and_are_the_same_for_all() -> None:
    moments = poisson(4000, 8.0, seed=1)
    assert moments == poisson(4000, 8.0, seed=1)
    assert moments[0] == 0
    # The mean gap of n exponential ones deviates by 1/sqrt(n), 1.6 %: four of them.
    assert moments[-1] / 3999 == pytest.approx(1 / 8.0, rel=0.064)


# Peers


def test_transformers_plain_gives_a_token_a_forward(config: Config) -> None:
    peer = TransformersGenerate(Contender("t", "transformers", "fp32"), config, JOB)
    measure = peer.run(PROMPTS, "chat", TOKENS)
    assert measure.tokens == 3 * TOKENS
    assert (measure.forwards, measure.decode.forwards, measure.decode.tokens) == (TOKENS, TOKENS - 1, 33)
    assert [len(times) for times in (measure.times.ttft_s, measure.times.gaps_s)] == [3, 33]


def test_transformers_lookup_needs_no_more_forwards_than_tokens(config: Config) -> None:
    peer = TransformersGenerate(Contender("t", "lookup", "fp32"), config, JOB)
    measure = peer.run(PROMPTS[:1], "chat", TOKENS)
    assert measure.tokens == TOKENS
    assert 0 < measure.forwards <= TOKENS


def test_an_answer_that_ends_early_is_as_long_as_it_is(config: Config) -> None:
    peer = TransformersGenerate(Contender("t", "transformers", "fp32"), config, {**JOB, "ignore_eos": False})
    end = peer._model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    assert peer._length([5, ends[0], 0, 0]) == 2
    assert peer._length([5, 6, 7]) == 3


def test_llama_gets_our_prompt_and_stops_where_it_should(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Llama:
        def __init__(self, **options: Any) -> None:
            self.options, self.resets = options, 0

        def token_eos(self) -> int:
            return 2

        def reset(self) -> None:
            self.resets += 1

        def generate(self, tokens: list[int], **sampling: Any) -> Iterator[int]:
            self.prompt, self.sampling = tokens, sampling
            yield from (7, 8, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama, __version__="0.3"))
    gguf = tmp_path / "x.Q4_1.gguf"
    gguf.write_bytes(b"1234")
    contender = Contender("llama", "llama.cpp", "Q4_1", gguf=str(gguf))
    ending = LlamaCpp(contender, config, {**JOB, "ignore_eos": False})
    assert ending.run(PROMPTS[:1], "chat", TOKENS).tokens == 3
    endless = LlamaCpp(contender, config, JOB)
    assert endless.run(PROMPTS[:1], "chat", TOKENS).tokens == TOKENS
    llama = endless._llama
    assert llama.resets == 1
    assert (llama.options["n_threads"], llama.sampling["temp"]) == (1, 0.0)
    peer = TransformersGenerate(Contender("t", "transformers", "fp32"), config, JOB)
    text = peer._tokenizer.apply_chat_template(PROMPTS[0], add_generation_prompt=True, tokenize=False)
    assert llama.prompt == peer._tokenizer.encode(text, add_special_tokens=False)


def test_weight_bytes_are_those_of_the_linear_layers(config: Config) -> None:
    loaded = load_model(config.target.model, home=config.home_path, weights="fp32")
    # Of tests/tiny: two layers of 32 wide with 4 heads, 2 for keys and values, 64 between; 320 tokens.
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert linear_bytes(loaded.model.config, "fp32") == 4 * (2 * layer + 320 * 32)
    assert linear_bytes(loaded.model.config, "int8") == 2 * layer + 320 * 32
