"""What an experiment is made of, and one whole run over a tiny target."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from learner.base import Base
from learner.initial import head_config, initial_head
from ops import cli
from ops.experiment_arms import ARMS
from ops.experiment_settings import ExperimentSettings, add_arguments, read_arguments
from ops.experiment_traffic import prompts_of
from shared.artifact import Artifact, Manifest, save_folder
from shared.errors import ConfigError
from shared.models.target import load_model
from tests.tiny import build_tiny_model

BASE = Base("eagle3", "hash", "target:fp32", 64, 0, (0, 1), 8, torch.nn.Identity(), None)  # type: ignore[arg-type]


def settings(*words: str) -> ExperimentSettings:
    parser = ArgumentParser()
    add_arguments(parser)
    return read_arguments(parser.parse_args(words))


def test_no_record_is_both_in_the_stream_and_apart_and_none_comes_twice() -> None:
    found = prompts_of(settings("--scale", "0.02"), BASE)
    assert [domain.name for domain in found] == ["maths", "sql", "german", "code"]
    ids = [prompt.id for domain in found for prompt in (*domain.stream, *domain.apart)]
    assert len(ids) == len(set(ids)) == 4 * 2 * 40  # 0.02 of 2000


def test_an_answer_is_named_by_all_that_it_depends_on() -> None:
    [first, *_] = prompts_of(settings("--scale", "0.02"), BASE)
    [again, *_] = prompts_of(settings("--scale", "0.02"), BASE)
    [longer, *_] = prompts_of(settings("--scale", "0.02", "--max-tokens", "65"), BASE)
    assert again == first
    assert not {prompt.id for prompt in longer.stream} & {prompt.id for prompt in first.stream}


def written(path: Path, rows: int) -> str:
    """Two of three rows are of domain a."""
    lines = [json.dumps({"domain": "ab"[i % 3 == 2], "prompt": f"{i}"}) for i in range(rows)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_file_keeps_its_order_and_every_second_row_apart(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.jsonl", 60)
    first, second = prompts_of(settings("--traffic", file, "--scale", "0.006"), BASE)
    said = [int(prompt.messages[0]["content"]) for prompt in first.stream]
    assert (first.name, second.name) == ("a", "b")
    assert said == [3 * i for i in range(12)]  # of a's 0, 1, 3, 4, 6, 7, ... every second one
    assert (len(first.apart), len(second.stream), len(second.apart)) == (12, 10, 10)


def test_a_domain_of_too_few_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--traffic: has 10 different prompts of b"):
        prompts_of(settings("--traffic", written(tmp_path / "mine.jsonl", 30)), BASE)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--scale", "1.5"], "--scale"),  # more records than prompts
        (["--scale", "0.001"], "--scale"),
        (["--domains", "chat"], "--domains"),
        (["--domains", "chat,nonsense"], "domain"),
        (["--arms", "onlin"], "--arms"),
        (["--served-per-s", "0"], "--served-per-s"),
    ],
)
def test_what_cannot_be_run_is_named_before_anything_is_computed(words: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prompts_of(settings(*words), BASE)
    assert refused.value.field == field


def test_arms_come_in_a_fixed_order_and_static_always() -> None:
    assert [arm.name for arm in settings("--arms", "online,offline-30").arms] == ["static", "offline-30", "online"]
    assert len(settings("--arms", "offline").arms) == 5
    assert settings().arms == tuple(ARMS.values())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A byte-level target, and an untrained head for it."""
    folder = tmp_path_factory.mktemp("tiny")
    target = build_tiny_model(folder / "target", vocab=300, positions=2048, spread=0.4)
    loaded = load_model(str(target), home=folder, device="cpu", weights="fp32")
    config = head_config(loaded.model, 256, loaded.max_positions)
    head = initial_head(loaded.model, config, torch.arange(256), seed=0)
    manifest = Manifest(version="base", kind="eagle3", form="full", target=loaded.fingerprint, config=config.to_dict())
    save_folder(Artifact(manifest, head.state_dict()), folder / "head")
    return target, folder / "head"


@pytest.mark.slow
def test_a_whole_experiment_and_the_same_again_from_disk(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = tiny
    words = ["experiment", "--scale", "0.02", "--target", str(target), "--drafter", str(head)]
    words += ["--data", str(tmp_path / "data"), "--png", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    changed = {
        "home": str(tmp_path),
        "target.dtype": "fp32",
        "learner.min_fresh_tokens": 200,
        "learner.attempt_tokens": 1500,
        "learner.learning_rate": 0.01,
    }
    words += [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    assert cli.run(words) == 0
    said, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert list(found["arms"]) == list(ARMS)
    # Three drifts to recover from, three domains to remember, and to be ahead of static.
    assert len(found["aims"]) == 7
    assert all(f"{aim['verdict']}: {aim['aim']}" in said.replace("\n", " ") for aim in found["aims"])
    assert found["arms"]["online"]["attempts"]
    assert found["run"]["command"]
    assert [domain["records"] for domain in found["traffic"]["domains"]] == [40] * 4
    learnt = {name: arm["tokens_learnt"] for name, arm in found["arms"].items()}
    assert learnt["static"] == 0 < learnt["offline-30"] < learnt["offline-50"] < learnt["offline-100"]
    # Nothing is generated or trained again.
    assert cli.run(words) == 0
    assert "What it takes" not in capsys.readouterr().out
    again = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert (again["arms"], again["aims"]) == (found["arms"], found["aims"])
