"""Loading: exact in every weight format, refused where it could not be, identified by what is computed."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shared.errors import ConfigError
from shared.models import fingerprint as fingerprint_module
from shared.models import target as target_module
from shared.models.linears import (
    PackedLinear,
    WeightKind,
    packing_supported,
    reference_input,
    reference_output,
    reference_weight,
)
from shared.models.target import load_model, resolve_device, resolve_model, resolve_weights
from tests.tiny import END_ID, FAMILIES, build_tiny_model

needs_packing = pytest.mark.skipif(
    not packing_supported(), reason="needs an x86_64 CPU with torch's packed linear operators"
)
CPU = torch.device("cpu")


def rounded_linear(linear: nn.Linear, kind: WeightKind, x: Tensor) -> Tensor:
    out = reference_output(reference_input(x, kind) @ linear.weight.T, kind)
    return out if linear.bias is None else out + linear.bias


def reference_logits(folder: Path, kind: WeightKind, ids: Tensor) -> Tensor:
    """Logits of transformers' own code, its linears given the weights and inputs of the packed format."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for linear in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        linear.weight = nn.Parameter(reference_weight(linear.weight, kind))  # unties a head from its embedding
        linear.forward = partial(rounded_linear, linear, kind)
    with torch.inference_mode():
        logits: Tensor = model(ids).logits
    return logits


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_fp16_logits_are_those_of_the_rounded_weights(tmp_path: Path, family: str, tied: bool) -> None:
    folder = build_tiny_model(tmp_path / "m", family=family, tied=tied)
    loaded = load_model(str(folder), home=tmp_path, device="cpu", weights="fp16")
    ids = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = loaded.model(ids).logits
    # only the order of fp32 sums differs; one step of fp16 in a weight would show as about 1e-3
    torch.testing.assert_close(logits, reference_logits(folder, "fp16", ids), atol=2e-4, rtol=0)
    assert (logits - reference_logits(folder, "fp32", ids)).abs().max() > 2e-4  # so the test tells formats apart


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_rounded_logits_are_those_of_the_rounded_model(tmp_path: Path, family: str, kind: WeightKind) -> None:
    if not packing_supported(kind):
        pytest.skip(f"needs a CPU with packed {kind} linear operators")
    folder = build_tiny_model(tmp_path / "m", family=family)
    loaded = load_model(str(folder), home=tmp_path, device="cpu", weights=kind)
    ids = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        off = (loaded.model(ids).logits - reference_logits(folder, kind, ids)).abs()
        rounding = (loaded.model(ids).logits - reference_logits(folder, "fp32", ids)).abs()
    # A value at the edge between two steps may fall either way, rarely; most logits are the same sums.
    assert off.median() < 1e-4
    assert off.mean() < rounding.mean() / 10


def test_a_loaded_model_is_ready_to_serve(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny-chat", vocab=300, pad_vocab_to=384, positions=96)
    loaded = load_model(str(folder), home=tmp_path, device="cpu")
    assert loaded.name == "tiny-chat"
    assert loaded.device == CPU
    assert loaded.weights == ("fp16" if packing_supported() else "fp32")
    assert loaded.fingerprint.endswith(f":{loaded.weights}")
    assert (loaded.vocab_size, loaded.token_count, loaded.max_positions) == (384, 300, 96)
    assert loaded.eos_token_ids == {END_ID}
    assert not any(module.training for module in loaded.model.modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    linears = [module for module in loaded.model.modules() if isinstance(module, nn.Linear | PackedLinear)]
    assert all(isinstance(module, PackedLinear) for module in linears) == packing_supported()
    chat = [{"role": "user", "content": "hi"}]
    text = loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_eos_ids_are_gathered_from_all_places(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [5, 9]}))
    edit_config(folder, eos_token_id=7)
    assert load_model(str(folder), home=tmp_path, device="cpu").eos_token_ids == {5, 7, 9, END_ID}


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", vocab=300)
    larger = build_tiny_model(tmp_path / "other", vocab=310)
    shutil.copy(larger / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(ConfigError, match="310 tokens, but the model only 300 logits"):
        load_model(str(folder), home=tmp_path, device="cpu")


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_positions_end_before_rotary_scaling_looks_at_the_batch(tmp_path: Path, rope_type: str) -> None:
    folder = build_tiny_model(tmp_path / "m", positions=512)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    edit_config(folder, rope_parameters=rope | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4})
    assert load_model(str(folder), home=tmp_path, device="cpu").max_positions == 128


# --- identity -------------------------------------------------------------------------------------------------


def identity(folder: Path, home: Path, weights: str = "fp32") -> str:
    return load_model(str(folder), home=home, device="cpu", weights=weights).fingerprint


def test_the_same_weights_have_the_same_fingerprint_however_they_are_stored(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded)
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    edit_config(sharded, transformers_version="9.9", use_cache=False, a_key_of_tomorrow=1)
    assert identity(folder, tmp_path) == identity(sharded, tmp_path)


def test_weights_architecture_and_format_each_change_the_fingerprint(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", seed=0)
    first = identity(folder, tmp_path)
    assert identity(build_tiny_model(tmp_path / "seed", seed=1), tmp_path) != first
    other = tmp_path / "rope"
    shutil.copytree(folder, other)
    edit_config(other, rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    assert identity(other, tmp_path) != first
    if packing_supported():
        assert identity(folder, tmp_path, "int8") == first.replace(":fp32", ":int8")


def test_the_fingerprint_is_hashed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    original = fingerprint_module._digest

    def counting(folder: Path, *rest: Any) -> str:
        hashed.append(folder)
        return original(folder, *rest)

    monkeypatch.setattr(fingerprint_module, "_digest", counting)
    folder = build_tiny_model(tmp_path / "m", seed=0)
    first = identity(folder, tmp_path)
    assert identity(folder, tmp_path) == first
    assert len(hashed) == 1
    build_tiny_model(folder, seed=1)
    assert identity(folder, tmp_path) != first
    assert len(hashed) == 2


def test_a_home_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    (tmp_path / "file").write_text("")
    assert identity(folder, tmp_path / "file") == identity(folder, tmp_path)


def test_a_torn_weight_file_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_model(str(folder), home=tmp_path, device="cpu")


# --- refusals -------------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "recurrent state"),
    ("rwkv", {}, "recurrent state"),
    ("jamba", {}, "recurrent state"),
    ("qwen3_next", {}, "recurrent state"),
    ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "not plain causal attention"),
    ("minimax", {}, "linear_attention"),
    ("llama4_text", {}, "chunked_attention"),
    ("bloom", {}, "registered attention function"),
    ("gemma3n_text", {}, "share the keys and values"),
    ("t5", {}, "encoder-decoder"),
    ("bert", {}, "both directions"),
    ("gemma3", {}, "text-only checkpoint"),
    ("vit", {}, "no causal language model"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantised"),
]


@pytest.mark.parametrize(("model_type", "settings", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_served_exactly_is_refused_before_weights_are_read(
    tmp_path: Path, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError, match=reason) as caught:
        load_model(str(tmp_path / "m"), home=tmp_path, device="cpu", field="drafter.model")
    assert caught.value.field == "drafter.model"


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "phi3", "olmo2", "mistral", "qwen3", "gemma3_text"])
def test_families_that_can_be_served_are_not_refused(model_type: str) -> None:
    target_module.check_supported(AutoConfig.for_model(model_type), "target")


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "homemade", "auto_map": auto_map}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n")
    with pytest.raises(ConfigError, match="homemade"):
        load_model(str(folder), home=tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_model_and_a_path_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        resolve_model(str(tmp_path / "absent"), tmp_path)
    AutoConfig.for_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        load_model(str(tmp_path / "bare"), home=tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(LocalEntryNotFoundError("offline"), "cannot be reached"), (HFValidationError("bad"), "neither a folder")],
)
def test_a_hub_name_that_cannot_be_fetched_says_what_else_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_model("somebody/some-model", tmp_path)
    assert "smollm2-135m-instruct" in caught.value.remedy


def test_a_hub_name_becomes_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_model(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folder))
    loaded = load_model("somebody/tiny", home=tmp_path, device="cpu")
    assert loaded.name == "somebody/tiny"


# --- device and weights ---------------------------------------------------------------------------------------


def test_weight_formats_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert resolve_weights("auto", cuda) == "bf16"
    assert resolve_weights("fp32", CPU) == "fp32"
    for weights, device in (("int8", cuda), ("int4", CPU)):
        with pytest.raises(ConfigError, match=weights):
            resolve_weights(weights, device)
    monkeypatch.setattr(target_module, "packing_supported", lambda _: True)
    found = [resolve_weights(kind, CPU) for kind in ("auto", "int8", "bf16")]
    assert found == ["fp16", "int8", "bf16"]


def test_without_packed_operators_the_model_is_served_in_fp32_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_module, "packing_supported", lambda _: False)
    with caplog.at_level("WARNING"):
        assert [resolve_weights(kind, CPU) for kind in ("auto", "fp16", "int8")] == ["fp32"] * 3
    assert caplog.text.count("fp32") == 3


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "nonsense:x"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        resolve_device(device)
