"""The flags of `redraft bench`, and what is asked of contenders."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from ops import bench_settings
from ops.bench_line_up import Contender, line_up
from ops.bench_prompts import cells, from_file
from ops.bench_settings import BenchSettings
from shared.errors import ConfigError


def read(*words: str) -> BenchSettings:
    parser = ArgumentParser()
    bench_settings.add_arguments(parser)
    return bench_settings.read_arguments(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--contenders", "plain,vllm"], "--contenders: 'vllm' is not known"),
        (["--contenders", "assisted"], "--assistant"),
        (["--dtype", "fp8"], "--dtype"),
        (["--gamma", "0"], "--gamma: 0 is too small"),
        (["--batch", "1,1"], "--batch"),
        (["--batch", "x"], "--batch"),
        (["--count", "0"], "--count"),
        (["--temperature", "3"], "--temperature"),
        (["--rate", "2"], "--rate"),
        (["--arrival", "poisson"], "--rate"),
        (["--arrival", "poisson", "--rate", "1", "--contenders", "plain,transformers"], "--arrival"),
        (["--against", "vllm"], "--against"),
        (["--domains", "poetry"], "domain: no prompt set"),
        (["--set", "engine.batch=3"], "engine.batch"),
        (["--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(*words)


def test_settings_reach_the_configuration() -> None:
    settings = read("--target", "./x", "--set", "engine.prefill_tokens=99", "--threads", "3")
    assert (settings.config.target.model, settings.config.engine.prefill_tokens, settings.threads) == ("./x", 99, 3)
    json.dumps(settings.to_dict())


def test_the_prefix_cache_is_off_unless_it_is_asked_for() -> None:
    assert not read().config.engine.prefix_cache
    assert read("--set", "engine.prefix_cache=true").config.engine.prefix_cache


def test_an_open_loop_leaves_peers_out_by_itself() -> None:
    assert read("--arrival", "poisson", "--rate", "2").contenders == ("plain", "speculative")


def test_the_line_up() -> None:
    words = ["--contenders", "plain,speculative,useless,traces,transformers,lookup", "--dtype", "fp16,int8"]
    settings = read(*words, "--gamma", "auto,3", "--against", "vllm=http://127.0.0.1:1", "--peer-dtype", "fp32")
    found = line_up(settings, "redis://127.0.0.1:2")
    assert [contender.name for contender in found] == [
        *(
            f"redraft {label} {dtype}"
            for dtype in ("fp16", "int8")
            for label in ("plain", "auto", "gamma 3", "useless", "auto + traces")
        ),
        "transformers fp32",
        "transformers lookup fp32",
        "vllm",
    ]
    assert [c.redis for c in found if c.redis] == ["redis://127.0.0.1:2"] * 2
    assert all(Contender.from_dict(json.loads(json.dumps(c.to_dict()))) == c for c in found)


def test_two_contenders_have_two_names() -> None:
    server = "vllm=http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="two contenders"):
        line_up(read("--against", server, "--against", server))


def test_those_who_answer_one_at_a_time_sit_out_larger_batches() -> None:
    assert [Contender("x", kind).takes(4) for kind in ("redraft", "transformers", "lookup", "llama.cpp", "server")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_groups_are_whole_and_every_batch_has_one() -> None:
    prompts = {"a": [[{"role": "user", "content": str(n)}] for n in range(8)]}
    found = cells(prompts, [1, 3, 8], count=4)
    assert [(cell.batch, cell.unit, len(cell.conversations)) for cell in found] == [
        *((1, unit, 1) for unit in range(4)),
        (3, 0, 3),
        (8, 0, 8),
    ]
    with pytest.raises(ConfigError, match="a has 8 prompts, too few for a batch of 9"):
        cells(prompts, [9], count=4)


def test_a_spec_bench_file(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Now shorter."]},
        {"question_id": 82, "category": "writing", "turns": ["Sing."]},
        {"question_id": 83, "category": "writing", "turns": ["Hum."]},
        {"question_id": 91, "category": "qa", "turns": ["Why?"], "reference": ["x"]},
        {"domain": "qa", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = from_file(path, 2)
    assert [[m["content"] for m in one] for one in found["writing"]] == [["Write."], ["Sing."]]
    assert [[m["content"] for m in one] for one in found["qa"]] == [["Why?"], ["Be brief.", "?"]]
