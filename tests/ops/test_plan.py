"""`redraft plan`: counts from the config are the real ones, and the arithmetic is what a person would do."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ops import cli, plan_measure
from ops.percentiles import percentile
from ops.plan_calls import Calls, _count, count_calls
from ops.plan_capacity import Goal, Load, capacity_of, memory_of, point_at, working_batch
from ops.plan_device import CallCosts, Device, Given, device_of, with_given
from ops.plan_roofline import Model
from ops.plan_rounds import Drafting, best_round, eagle3_head, pays_until, round_of
from ops.plan_shape import ModelShape, read_shape
from ops.plan_simulation import simulate
from ops.plan_validate import compare
from shared.config import load_config
from shared.errors import ConfigError
from shared.models.eagle3 import Eagle3Config, Eagle3Head
from shared.models.target import load_model
from tests.tiny import build_tiny_model

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "docs" / "configs"
# A model and a device with round figures: 1e9 weights in the layers, 1e8 in the head; 1e12 bytes/s, 1e14 FLOP/s.
SHAPE = ModelShape("round", 10, 1000, 4000, 10, 10, 100, 100_000, 10**6, body=10**9, head=10**8, table=10**8)
DEVICE = Device("round", 80e9, 1e12, 1e14)
MODEL = Model(SHAPE, "bf16", DEVICE)
NONE = Drafting("none", 0.0)


# From the config


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen3", False), ("gemma2", True)])
def test_every_parameter_is_counted_once(tmp_path: Path, family: str, tied: bool) -> None:
    folder = build_tiny_model(tmp_path, family=family, tied=tied, layers=3)
    shape = read_shape(str(folder), "--target")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.head == model.get_output_embeddings().weight.numel()
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 8)


def test_the_seventy_billion_are_the_published_ones() -> None:
    shape = read_shape(str(CONFIGS / "llama-3.1-70b.json"), "--target")
    assert shape.parameters == 70_553_706_496
    assert shape.kv_bytes(2) == 327_680  # 2 · 80 layers · 8 heads · 128 · 2 bytes


def test_experts_are_read_as_rows_choose_them(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "--target")
    assert shape.experts == 2 * 8 * 3 * 32 * 64  # layers, experts, matrices of one
    assert shape.active == shape.body + shape.experts * 2 / 8
    assert shape.read(1) == pytest.approx(shape.active)
    assert shape.read(1000) == pytest.approx(shape.body + shape.experts)


def test_what_the_engine_refuses_is_said_with_its_reason(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--target"):
        read_shape(str(tmp_path), "--target")
    file = tmp_path / "wrong.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="gives no model config"):
        read_shape(str(file), "--target")


def test_calls_grow_by_the_layer_and_are_those_of_the_engine(tmp_path: Path) -> None:
    folder = str(build_tiny_model(tmp_path, layers=5))
    assert count_calls(folder, "--target", "fp16") == _count(folder, "--target", "fp16", 5)
    one, five = _count(folder, "--target", "fp16", 1), count_calls(folder, "--target", "fp16")
    # A layer has at least q·k·v, o, gate·up and down; the head is one more.
    assert 4 <= (five.linears - one.linears) / 4 <= 7
    assert count_calls(folder, "--target", "int8").ops > five.ops


# The roofline


def test_a_step_reads_everything_or_computes_everything() -> None:
    few, many = MODEL.step(1, 0, 1), MODEL.step(1000, 0, 1000)
    assert few.body == pytest.approx(2e9 / 1e12)
    assert many.body == pytest.approx(2 * 1e9 * 1000 / 1e14)
    # The ridge: 1e14 / 2 / 1e12 = 50 multiply-adds a byte, 100 rows for two bytes a weight.
    assert MODEL.step(100, 0, 1).body == pytest.approx(few.body)
    assert MODEL.step(101, 0, 1).body > few.body


def test_attention_reads_the_keys_of_each_sequence_once() -> None:
    token = 2 * 10 * 10 * 100 * 2  # keys and values, layers, heads, width, bytes
    assert MODEL.kv_token == token
    assert MODEL.step(8, 500, 2).attention == pytest.approx(token * 2 * 500 / 1e12)
    assert MODEL.step(8, 500, 8).attention == pytest.approx(token * 8 * 500 / 1e12)


def test_calls_are_charged_by_the_machine() -> None:
    device = replace(DEVICE, calls=CallCosts(1e-3, 1e-4, 1e-5))
    model = Model(SHAPE, "bf16", device, Calls(7, 20, 30))
    assert model.step(1, 0, 1).calls == pytest.approx(7e-3 + 20e-4 + 30e-5)


def test_a_given_figure_is_taken_as_it_is_and_a_data_sheet_is_not() -> None:
    device = device_of("h100", Given(bandwidth_gbs=3000))
    assert device.bandwidth == 3000e9
    assert device.flops == pytest.approx(989e12 * 0.6)
    assert device_of("h100", reached=(1.0, 1.0)).bandwidth == pytest.approx(3350e9)
    with pytest.raises(ConfigError, match="not in the table"):
        device_of("abacus", Given(memory_gb=1))


def test_what_is_given_of_a_measured_device_replaces_its_figure() -> None:
    device = with_given(replace(DEVICE, origin="measured"), Given(memory_gb=16))
    assert (device.memory, device.bandwidth, device.flops) == (16e9, DEVICE.bandwidth, DEVICE.flops)
    assert device.origin == "memory 16 GB as given, measured"
    assert with_given(DEVICE, Given(bandwidth_gbs=20, tflops=0.5)).flops == 0.5e12


# Drafting


def test_a_round_yields_the_series_of_alpha() -> None:
    found = round_of(MODEL, Drafting("ngram", 0.5), 1, 3, 100)
    assert found.tokens == 1 + 0.5 + 0.25 + 0.125
    assert found.draft == 0
    assert found.token_seconds == pytest.approx(found.verify / 1.875)


def test_drafting_pays_while_reading_hides_the_rows() -> None:
    free = Drafting("ngram", 0.5)
    assert best_round(MODEL, free, 1, 0).gamma == 4
    assert best_round(MODEL, free, 400, 0).gamma == 0  # 4 × the ridge: every row costs its arithmetic
    last = pays_until(MODEL, free, 0)
    # With gamma 1 a round of B costs 2·B rows' arithmetic for 1.5 tokens; plain rounds are free of it up to 100 rows:
    # it pays up to about 1.5 · 100 / 2 = 75, a little less for the logits' passes.
    assert 65 <= last <= 75
    assert best_round(MODEL, free, last + 1, 0).gamma == 0
    assert pays_until(MODEL, Drafting("ngram", 0.0), 0) == 0


def test_the_planned_head_is_the_head_that_would_be_served() -> None:
    shape = replace(SHAPE, hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, vocab=300)
    head = eagle3_head(Model(shape, "bf16", DEVICE), draft_vocab=100)
    config = Eagle3Config(32, (0, 1, 2), 32, 64, 4, 2, 8, 100)
    real = sum(parameter.numel() for parameter in Eagle3Head(config, torch.zeros(300, 32)).parameters())
    assert head.shape.parameters + head.fused == real


def test_a_language_model_drafts_at_its_own_cost() -> None:
    small = Model(replace(SHAPE, body=10**8, head=10**7), "bf16", DEVICE)
    drafting = Drafting("model", 0.8, small)
    found = round_of(MODEL, drafting, 1, 4, 100)
    assert found.draft == pytest.approx(4 * small.step(1, 100, 1).seconds)
    # The head reads its fusion in the first draft of a round, and every position that the last round committed.
    head = eagle3_head(MODEL, draft_vocab=32000)
    first = head.step(2.952, 100, 1, decided=1, fused=True).seconds
    assert Drafting("eagle3", 0.8, head).seconds(1, 3, 100, 2.952) == pytest.approx(
        first + 2 * head.step(1, 100, 1).seconds
    )


# Capacity

LOAD = Load(qps=100, prompt=1000, output=200, chunk=500, utilisation=0.8)


def test_memory_is_weights_and_whole_sequences() -> None:
    memory = memory_of(MODEL, NONE, LOAD, 0.9)
    assert memory.weights == 2 * (10**9 + 2 * 10**8)
    assert memory.sequence == 1200 * 40_000
    assert memory.sequences == int((72e9 - 2.4e9) // (1200 * 40_000))


def test_a_replica_spends_on_a_request_what_its_rounds_and_chunks_cost() -> None:
    point = point_at(MODEL, NONE, LOAD, 10)
    rounds, chunks = 200 / 10, 1000 / 500
    seconds = chunks * point.mixed.seconds + (rounds - chunks) * point.round.seconds
    assert point.request_seconds == pytest.approx(seconds)
    assert point.itl == pytest.approx(seconds / rounds)
    # 200 requests at once need one round a token each, and two prompt steps each: prompts are what is waited for.
    crowded = point_at(MODEL, NONE, LOAD, 200)
    assert crowded.request_seconds == pytest.approx(2 * crowded.mixed.seconds)


def test_goals_bound_the_batch_and_the_rest_is_division() -> None:
    free = capacity_of(MODEL, NONE, LOAD, Goal(), memory_share=0.9, max_batch=256)
    tight = capacity_of(MODEL, NONE, LOAD, Goal(itl=0.005), memory_share=0.9, max_batch=256)
    assert free.point is not None
    assert tight.point is not None
    assert tight.point.itl <= 0.005 < free.point.itl
    assert tight.point.batch < free.point.batch
    assert tight.replicas > free.replicas == -(-100 // (0.8 * free.point.rate))
    never = capacity_of(MODEL, NONE, LOAD, Goal(itl=1e-4), memory_share=0.9)
    assert never.point is None
    assert "no batch meets the goals" in never.why
    small = capacity_of(Model(SHAPE, "bf16", replace(DEVICE, memory=2e9)), NONE, LOAD, Goal(), memory_share=0.9)
    assert "not one sequence" in small.why


# Simulation


@pytest.mark.parametrize("drafting", [NONE, Drafting("ngram", 0.6)], ids=lambda drafting: drafting.kind)
def test_the_simulation_agrees_with_the_closed_form(drafting: Drafting) -> None:
    capacity = capacity_of(MODEL, drafting, LOAD, Goal(itl=0.02), memory_share=0.9, max_batch=64)
    assert capacity.point is not None
    rate = 0.6 * capacity.point.rate
    batch = working_batch(MODEL, drafting, LOAD, rate, capacity.point.batch)
    found = simulate(MODEL, drafting, LOAD, rate, max_batch=capacity.point.batch, requests=4000, seed=1)
    # 3,200 requests of a Poisson stream leave about 2 % of noise in the rate. The closed form has a batch of the mean
    # size at all times; one that swings (6 ± 2.5 here) takes a little longer, as step times are convex in the batch.
    assert found.batch == pytest.approx(batch, rel=0.15)
    assert sum(found.itl) / len(found.itl) == pytest.approx(batch / (rate * LOAD.output), rel=0.15)
    assert found.tokens_rate == pytest.approx(rate * LOAD.output, rel=0.06)


def test_a_lone_request_waits_for_nobody() -> None:
    found = simulate(MODEL, NONE, LOAD, 1e-3, max_batch=64, requests=50, seed=0)
    alone = round_of(MODEL, NONE, 1, 0, LOAD.context).seconds
    assert percentile(found.itl, 0.5) == pytest.approx(alone, rel=0.01)
    prompt = 2 * round_of(MODEL, NONE, 0, 0, LOAD.prompt, prompt=500).seconds
    assert percentile(found.ttft, 0.5) == pytest.approx(prompt, rel=0.05)


def test_a_seed_is_a_run_and_overload_shows() -> None:
    def run(rate: float, seed: int) -> list[float]:
        return simulate(MODEL, NONE, LOAD, rate, max_batch=8, requests=300, seed=seed).ttft

    rate = point_at(MODEL, NONE, LOAD, 8).rate
    assert run(0.5 * rate, 3) == run(0.5 * rate, 3) != run(0.5 * rate, 4)
    assert percentile(run(2 * rate, 3), 0.5) > 10 * percentile(run(0.5 * rate, 3), 0.5)


# The command


def plan(*words: str, target: str = "llama-3.1-70b") -> list[str]:
    return ["plan", "--target", str(CONFIGS / f"{target}.json"), *words]


def test_what_does_not_fit_is_not_servable_and_still_worked_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(plan("--device", "h100", "--qps", "10", "--json", str(tmp_path / "plan.json"))) == 0
    said = capsys.readouterr().out
    assert "**Not servable by this release**" in said
    assert "141.1 GB" in said
    assert "(hypothetical)" in said
    tree = json.loads((tmp_path / "plan.json").read_text())
    assert tree["model"]["device"]["count"] >= 2
    assert tree["devices"] == tree["chosen"]["replicas"] * tree["model"]["device"]["count"]


def test_what_fits_is_planned_on_single_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = plan("--device", "l4", "--qps", "50", "--price", "0.5", "--alpha", "0.6", target="llama-3.2-1b")
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    assert "Not servable" not in said
    assert "hypothetical" not in said
    assert "an hour" in said


def test_what_is_recommended_is_what_this_release_serves(capsys: pytest.CaptureFixture[str]) -> None:
    """Lookups cost nothing, so with a high α they need the fewest replicas."""
    words = plan("--device", "l4", "--qps", "50", "--alpha", "ngram=0.9,eagle3=0.1", target="llama-3.2-1b")
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    assert "n-gram" not in said.split("##")[0]
    assert "| n-gram (not in this release) | 0.9 |" in said
    assert "## N-gram (not in this release), α = 0.9" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "abacus"], "--device: 'abacus' is not in the table"),
        (["--alpha", "1.5"], "--alpha: '1.5' is not understood"),
        (["--alpha", "medusa=0.5"], "--alpha: 'medusa=0.5' is not understood"),
        (["--qps", "0"], "--qps: 0 is out of range"),
        (["--reached", "2,1"], "--reached: '2,1' is not two shares"),
        (["--validate"], "only a CPU is measured"),
        (["--target", "/nope"], "--target: there is no file or folder /nope. Check the path"),
        (["--draft-model", "no/such/place"], "--draft-model: there is no file or folder no/such/place"),
        (["--device", "cpu", "--reached", "1,1"], "--reached: a CPU has no entry in the table"),
        (["--dtype", "int8"], "int8 is a CPU format"),
        (["--drafter", "model"], "a draft model needs a config"),
    ],
)
def test_a_mistake_names_its_flag(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(plan(*words)) == cli.REFUSED
    assert said in capsys.readouterr().err


def test_the_worked_examples_are_what_the_command_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- output of: redraft (.*?) -->\n\n(.*?)\n<!-- end -->", text, flags=re.S)
    assert len(blocks) == 2
    for words, shown in blocks:
        assert cli.run(shlex.split(words)) == 0
        assert re.sub(r"^#", "###", capsys.readouterr().out, flags=re.M) == shown


def test_the_machine_is_measured_and_the_engine_runs_beside_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That both can be had, for a model that decodes in no time; how near they are is for a quiet machine to say."""
    monkeypatch.setattr(plan_measure, "_LEAST_BYTES", 2**20)
    monkeypatch.setattr(plan_measure, "_REPEATS", 1)
    monkeypatch.setattr(plan_measure, "_WIDTH", 128)
    folder = build_tiny_model(tmp_path, layers=1)
    config = load_config(environ={}, overrides={"home": str(tmp_path / "home"), "target.model": str(folder)})
    loaded = load_model(str(folder), home=config.home_path, device="cpu", weights="fp32")
    shape = read_shape(str(folder), "--target")
    device = plan_measure.measure_cpu("fp32", 0)
    assert device.bandwidth > 0
    assert device.flops > 0
    assert device.calls.any
    target = Model(shape, "fp32", device, count_calls(str(folder), "--target", "fp32"))
    [row] = compare(config, loaded, target, NONE, (2,), (0, 3))  # no drafter: gamma 3 is left out
    assert (row.batch, row.gamma, row.tested) == (2, 0, 0)
    assert row.predicted_seconds > 0
    # Two requests emit two tokens a step, whatever the machine.
    assert row.predicted_tokens == pytest.approx(2 / row.predicted_seconds)
    assert row.measured_tokens > 0
