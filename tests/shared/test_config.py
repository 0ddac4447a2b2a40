"""The configuration's contract: later sources win, and what cannot be used is an error that names its key."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shared.config import (
    Config,
    config_from_dict,
    config_from_flat,
    config_keys,
    load_config,
    values_of_environ,
    variable_of,
)
from shared.errors import ConfigError

KEYS = sorted(config_keys())


def load(tmp_path: Path, text: str, **sources: Any) -> Config:
    file = tmp_path / "redraft.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, environ=sources.get("environ", {}), overrides=sources.get("overrides", {}))


def test_without_sources_everything_is_at_its_default() -> None:
    assert load_config(environ={}) == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    text = "engine: {max_batch: 2, max_queue: 2, block_size: 2}"
    environ = {"REDRAFT_ENGINE_MAX_BATCH": "3", "REDRAFT_ENGINE_MAX_QUEUE": "3"}
    config = load(tmp_path, text, environ=environ, overrides={"engine.max_batch": 4})
    assert (config.engine.max_batch, config.engine.max_queue, config.engine.block_size) == (4, 3, 2)
    assert config.engine.prefill_tokens == Config().engine.prefill_tokens


def test_the_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_SERVE_PORT", "8123")
    assert load_config().serve.port == 8123


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_one_variable(key: str) -> None:
    section, _, name = key.rpartition(".")
    default = getattr(getattr(Config(), section) if section else Config(), name)
    text = default if isinstance(default, str) else json.dumps(default)
    assert values_of_environ({variable_of(key): text}) == {key: text}
    assert load_config(environ={variable_of(key): text}) == Config()


def test_no_two_keys_share_a_variable() -> None:
    assert len({variable_of(key) for key in KEYS}) == len(KEYS)


def test_variables_of_others_are_left_alone() -> None:
    assert load_config(environ={"PATH": "/bin", "REDRAFTING": "1", "_REDRAFT_STACK": "x"}) == Config()


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("drafter.gamma", "auto", "auto"),
        ("drafter.gamma", "3", 3),
        ("drafter.gamma", 0, 0),
        ("learner.enabled", "false", False),
        ("learner.learning_rate", "1", 1.0),
        ("learner.learning_rate", 2e-4, 2e-4),
        ("learner.lora_targets", ["q", "v"], ("q", "v")),
        ("learner.lora_targets", "[q, v]", ("q", "v")),
        ("target.model", "123", "123"),  # text stays text, whatever it looks like
        ("target.dtype", "int8", "int8"),
        ("redis.url", "", ""),
    ],
)
def test_values_are_read_as_the_type_of_their_key(key: str, value: Any, found: Any) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(config_from_flat({key: value}), section), name) == found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drafter.gamma", "fast"),
        ("drafter.gamma", 2.5),
        ("drafter.gamma", True),
        ("drafter.gamma", -1),
        ("drafter.gamma", 99),
        ("drafter.gamma_max", 17),
        ("drafter.kind", "medusa"),
        ("engine.max_batch", 0),
        ("engine.max_batch", "many"),
        ("engine.max_batch", 1.5),
        ("engine.max_batch", None),
        ("engine.max_batch", "[1"),  # not even YAML
        ("learner.enabled", 1),
        ("learner.enabled", "yes please"),
        ("learner.learning_rate", ".nan"),
        ("learner.lora_targets", "q"),
        ("learner.lora_targets", [1]),
        ("target.model", 5),
        ("target.dtype", "fp8"),
        ("serve.port", 65536),
        ("gate.confidence", "high"),
        ("trace.position_share", 1.1),
        ("trace.stream_bytes", 2**40),
        ("home", 3),
    ],
)
def test_an_unusable_value_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from_flat({key: value})
    assert raised.value.field == key
    assert str(raised.value).startswith(f"{key}: ")
    assert raised.value.remedy


def test_an_unknown_key_suggests_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_batc: unknown key\. Did you mean engine\.max_batch\?"):
        load(tmp_path, "engine: {max_batc: 2}")
    with pytest.raises(ConfigError, match=r"motor: unknown key"):
        load(tmp_path, "motor: {max_batch: 2}")
    with pytest.raises(ConfigError, match=r"REDRAFT_SERVE_PROT.*Did you mean REDRAFT_SERVE_PORT\?"):
        load_config(environ={"REDRAFT_SERVE_PROT": "1"})
    with pytest.raises(ConfigError, match=r"nonsense: unknown key"):
        load_config(environ={}, overrides={"nonsense": 1})


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n"])
def test_an_empty_file_or_section_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == Config()


@pytest.mark.parametrize("text", ["- a\n- b", "engine: [", "just words", "engine: 5", "engine: [1]", "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml", environ={})


def test_a_number_too_large_for_its_partner_is_refused() -> None:
    assert config_from_flat({"drafter.gamma": 8, "drafter.gamma_max": 8}).drafter.gamma == 8
    with pytest.raises(ConfigError, match=r"drafter\.gamma: 5 is not between 0 and drafter\.gamma_max \(4\)"):
        config_from_flat({"drafter.gamma": 5})
    # The champion and its blobs must always find room beside the traces.
    assert config_from_flat({"trace.stream_bytes": 2**20, "redis.maxmemory": 2**21})
    with pytest.raises(ConfigError, match=r"trace\.stream_bytes"):
        config_from_flat({"trace.stream_bytes": 2**20, "redis.maxmemory": 2**21 - 1})


@given(st.fixed_dictionaries({}, optional={"engine.max_batch": st.integers(1, 1024), "home": st.text(min_size=1)}))
def test_a_config_survives_the_way_through_yaml(values: dict[str, Any]) -> None:
    config = config_from_flat(values)
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    for part in (config, *(getattr(config, f.name) for f in fields(config))):
        if is_dataclass(part):
            with pytest.raises(FrozenInstanceError):
                setattr(part, fields(part)[0].name, "x")


def test_the_home_folder_may_start_with_a_tilde() -> None:
    assert config_from_flat({"home": "~/x"}).home_path == Path.home() / "x"
