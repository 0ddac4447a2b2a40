"""A demo begins from nothing and leaves the real installation alone."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from ops import demo
from ops.demo_settings import demo_settings, empty_home, status_command
from ops.run_file import owned_home
from ops.settings import Settings
from shared.errors import ConfigError


def _settings(*argv: str) -> Settings:
    parser = ArgumentParser()
    demo.add_arguments(parser)
    return demo_settings(parser.parse_args(argv))


def test_the_control_measures_and_never_promotes() -> None:
    usual, control = _settings().config, _settings("--no-learn").config
    assert control.learner == usual.learner
    assert control.learner.enabled
    assert control.gate.min_gain == 100  # gamma_max is 16: no drafter makes more than 17 times the tokens
    assert usual.gate.min_gain < 1


def test_it_has_a_home_of_its_own_where_status_finds_it(tmp_path: Path) -> None:
    config = _settings("--set", f"home={tmp_path}").config
    assert config.home_path == tmp_path / "demo"
    assert status_command(config) == f"REDRAFT_HOME={tmp_path}/demo redraft status"


def test_on_a_server_of_others_it_has_a_prefix_of_its_own() -> None:
    given = ("--set", "redis.url=redis://10.0.0.1:6379/0")
    prefix = _settings(*given).config.redis.prefix
    assert prefix not in ("redraft", _settings(*given).config.redis.prefix)
    assert f"REDRAFT_REDIS_PREFIX={prefix} " in status_command(
        _settings(*given, "--set", f"redis.prefix={prefix}").config
    )
    assert _settings(*given, "--set", "redis.prefix=mine").config.redis.prefix == "mine"


def test_another_mlflow_is_used_only_when_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_MLFLOW_TRACKING_URI", "http://real")
    assert _settings().config.mlflow.tracking_uri == ""
    assert _settings("--set", "mlflow.tracking_uri=http://mine").config.mlflow.tracking_uri == "http://mine"


def test_settings_pass_through() -> None:
    chosen = _settings("--gamma", "3", "--set", "learner.lora_rank=8")
    assert (chosen.config.drafter.gamma, chosen.config.learner.lora_rank) == (3, 8)
    with pytest.raises(ConfigError, match=r"learner\.rank"):
        _settings("--set", "learner.rank=8")


@pytest.mark.parametrize(
    "flags", [["--users", "0"], ["--minutes", "-1"], ["--temperature", "3"], ["--max-tokens", "x"]]
)
def test_senseless_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        _settings(*flags)


def test_the_home_is_emptied_but_models_are_shared(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    home = tmp_path / "demo"
    empty_home(home)
    (home / "learner").mkdir()
    (home / "learner" / "ledger.db").touch()
    (home / "old.txt").touch()
    empty_home(home)
    assert sorted(path.name for path in home.iterdir()) == ["fingerprints", "models", "run"]
    assert (home / "models" / "m").is_dir()


def test_a_home_in_use_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    empty_home(home)
    (home / "learner").mkdir()
    with owned_home(home), pytest.raises(ConfigError, match="another stack"):
        empty_home(home)
    assert (home / "learner").is_dir()
