"""Each planted fault is named with its evidence and a remedy, alone; a healthy stack has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from ops import cli
from ops.doctor_checks import CHECKS, diagnose
from ops.doctor_evidence import Evidence, Model, read_model
from shared.artifact import Manifest
from shared.config import load_config
from shared.counters import Counters
from shared.store import Champion, Store
from shared.stream import StreamDepth
from shared.trace import Round, Sampling, TraceRecord, encode
from tests.learner.records import random_record
from tests.tiny import build_tiny_model

NOW = 1_000_000.0
MARK = 1  # the token that the chat template writes
TARGET = Model("tiny", "llama", "abc", {"a": 0, "<|start|>": MARK}, frozenset({MARK}))
HELD_OUT = {"sql": {"alpha": 0.4, "accepted": 400, "tested": 1000}}


def trace(seed: int, *, temperature: float = 0.0, marked: bool = True, prompt: int = 20) -> TraceRecord:
    """Ten rounds of four tested drafts, two of them kept."""
    record = random_record(seed, sampling=Sampling(temperature=temperature), domain="sql", outputs=40, prompt=prompt)
    ids = np.where(record.prompt_ids == MARK, MARK + 1, record.prompt_ids).astype(np.int32)
    if marked:
        ids[0] = MARK
    return replace(record, prompt_ids=ids, rounds=tuple(Round(n, "v2", (2, 3, 4, 5), 2, 3) for n in range(10)))


def counters(**values: float) -> Counters:
    found = Counters()
    for name, value in (
        {"steps": 5000, "spec_steps": 4000, "drafted": 8000, "tested": 6000, "accepted": 2400} | values
    ).items():
        found.add(name, value, domain="sql", version="v2")
    return found


def healthy() -> Evidence:
    return Evidence(
        config=load_config(environ={}),
        api=(200, "ready"),
        replicas={"replica:a": {"drafter_version": "v2", "running": 3, "waiting": 0}},
        learner={"state": "reading traces", "trouble": [], "drift": {"sql": 0.2}},
        champion=Champion("v2", "b", "h", "abc:fp16", "eagle3", 2, "v1", NOW - 3600),
        counters=counters(),
        depth=StreamDepth(50, 0, 0, 0, 0),
        traces=tuple(trace(n) for n in range(30)),
        target=TARGET,
        head=Manifest(
            "base", "eagle3", "full", "abc:fp16", config={"max_positions": 4096}, metrics={"held_out": HELD_OUT}
        ),
        now=NOW,
    )


def configured(evidence: Evidence, **values: object) -> Evidence:
    overrides = {name.replace("__", "."): value for name, value in values.items()}
    return replace(evidence, config=load_config(environ={}, overrides=overrides))


def with_model(evidence: Evidence, drafter: Model) -> Evidence:
    return replace(evidence, head=None, drafter=drafter)


FAULTS: dict[str, tuple[Callable[[Evidence], Evidence], str, str]] = {
    "vocabulary": (
        lambda e: with_model(e, replace(TARGET, tokens={"a": 0, "<|start|>": 7})),
        "the tokenizers differ", "'<|start|>' has id 7 in the drafter and 1 in the target",
    ),
    "template": (
        lambda e: replace(e, traces=tuple(trace(n, marked=False) for n in range(30))),
        "prompts do not follow the template", "30 of the newest 30 prompts",
    ),
    "temperature": (
        lambda e: replace(e, traces=tuple(trace(n, temperature=1.4) for n in range(30))),
        "the temperature is high", "30 of 30 requests sample above temperature 1",
    ),
    "head of another target": (
        lambda e: replace(e, head=replace(e.head, target="other:fp16")),  # type: ignore[type-var]
        "the drafter is of another family", "made for target other",
    ),
    "model of another family": (
        lambda e: with_model(e, replace(TARGET, family="gpt2")),
        "the drafter is of another family", "the drafter is a gpt2, the target a llama",
    ),
    "drift that the learner sees": (
        lambda e: replace(e, learner={"trouble": [], "drift": {"sql": 1.7}, "next": "an attempt for sql"}),
        "the domain sql has drifted", "drift score is 1.70",
    ),
    "drift that nobody watches": (
        lambda e: replace(e, counters=counters(accepted=600)),
        "the domain sql has drifted", "its α is 0.10 of 6,000; the head had 0.40",
    ),
    "stale drafter": (
        lambda e: replace(e, replicas={"replica:a": {"drafter_version": "v1"}}),
        "a replica's drafter is stale", "the champion is v2, and replica:a serves v1",
    ),
    "drafter's context": (
        lambda e: replace(e, traces=tuple(trace(n, prompt=5000) for n in range(30))),
        "the drafter's context is too short", "30 of 30 requests go beyond the head's 4,096 positions",
    ),
    "gamma too long": (
        lambda e: replace(configured(e, drafter__gamma=4), counters=counters(drafted=16000, tested=6000)),
        "gamma is too long", "gamma is fixed at 4, and verification reached only 6,000 of 16,000 drafts",
    ),
    "batch too large": (
        lambda e: replace(
            e, replicas={"replica:a": {"drafter_version": "v2", "running": 16, "waiting": 9}},
            counters=counters(spec_steps=30, drafted=30, tested=30, accepted=12),
        ),
        "the batch is too large for speculation", "of 5,000 request steps 30 drafted",
    ),
    "speculation off by setting": (
        lambda e: configured(e, drafter__gamma=0), "speculation is off", "drafter.gamma 0",
    ),
    "speculation off by every request": (
        lambda e: replace(e, counters=counters(spec_steps=0, drafted=0, tested=0, accepted=0)),
        "speculation is off", "none of 5,000 steps drafted",
    ),
    "learner down": (lambda e: replace(e, learner=None), "the learner is down", "no heartbeat"),
    "learner in trouble": (
        lambda e: replace(e, learner={"trouble": ["MLflow is away"], "drift": {}}),
        "the learner is in trouble", "MLflow is away",
    ),
    "traces lost": (
        lambda e: replace(e, depth=StreamDepth(50, 0, 0, 17, 2)),
        "traces are lost", "17 trimmed before they were read, 2 unreadable",
    ),
    "redis away": (lambda e: replace(e, redis_error="refused", learner=None), "Redis is away", "refused"),
    "api away": (lambda e: replace(e, api=(503, "loading")), "the API is not ready", "503 loading"),
    "drafter missing": (
        lambda e: replace(e, head=None, drafter_error="no head is shipped for tiny"),
        "the drafter cannot be loaded", "no head is shipped",
    ),
}  # fmt: skip


def test_a_healthy_stack_has_nothing() -> None:
    assert diagnose(healthy()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_alone_with_evidence_and_remedy(name: str) -> None:
    plant, fault, shown = FAULTS[name]
    [finding] = diagnose(plant(healthy()))
    assert finding.fault == fault
    assert shown in finding.evidence
    assert finding.remedy


def test_little_traffic_is_no_evidence() -> None:
    few = counters(steps=100, spec_steps=0, drafted=0, tested=0, accepted=0)
    assert diagnose(replace(healthy(), counters=few, traces=(trace(1, marked=False),))) == []
    young = Champion("v3", "b", "h", "abc:fp16", "eagle3", 3, "v2", NOW - 2)
    assert diagnose(replace(healthy(), champion=young)) == []  # it has just been promoted


def test_every_check_has_a_fault_that_it_finds() -> None:
    for check in CHECKS:
        assert any(check(plant(healthy())) for plant, _, _ in FAULTS.values()), check.__name__


def test_a_models_files_say_what_its_template_writes(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    model = read_model(folder, tmp_path / "home")
    assert model.family == "llama"
    assert len(model.tokens) == 320
    assert model.template_ids == {1, 2}  # <|start|> and <|end|>


def test_the_command_ends_with_what_it_found(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stack whose API is not there, on a real Redis, with a tiny target that nothing drafts for."""
    prefix = f"test-{uuid4().hex}"
    store = Store(redis_url, prefix)
    store.append_trace(encode(trace(1)), max_bytes=10**7)
    store.put_counters("r", "e", counters().fields)
    store.close()
    words = ["doctor", "--target", str(build_tiny_model(tmp_path / "t")), "--port", "1", "--json"]
    for key, value in (("home", tmp_path / "home"), ("redis.url", redis_url), ("redis.prefix", prefix)):
        words += ["--set", f"{key}={value}"]
    assert cli.run(words) == 1
    faults = [finding["fault"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert faults == ["the API is not ready", "the learner is down"]
    assert cli.run(["doctor", "--set", f"home={tmp_path / 'nobody'}"]) == cli.REFUSED
