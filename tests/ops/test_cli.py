"""The command line: flags become keys, mistakes become one line, endings become exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml

from ops import cli, settings, status
from ops.run_file import RunningStack, owned_home, read_run_file, write_run_file
from shared.config import Config, config_from_dict
from shared.errors import ConfigError, RedraftError, ServiceDown
from shared.store import Champion, Store

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REDRAFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))


def read(*words: str, environ: dict[str, str] | None = None) -> settings.Settings:
    from argparse import ArgumentParser

    parser = ArgumentParser()
    settings.add_arguments(parser)
    return settings.read_settings(parser.parse_args(words), environ=environ or {})


# Flags and sources


def test_each_flag_sets_its_key() -> None:
    chosen = read(
        *("--target", "t", "--drafter", "d", "--device", "cpu", "--dtype", "int8", "--replicas", "3"),
        *("--host", "0.0.0.0", "--port", "81", "--gamma", "2", "--no-learn", "--set", "engine.max_batch=5"),
    )
    config = chosen.config
    assert (config.target.model, config.target.device, config.target.dtype) == ("t", "cpu", "int8")
    assert (config.drafter.model, config.drafter.gamma) == ("d", 2)
    assert (config.serve.replicas, config.serve.host, config.serve.port) == (3, "0.0.0.0", 81)
    assert (config.learner.enabled, config.engine.max_batch) == (False, 5)
    assert chosen.sources["serve.port"] == "--port"
    assert chosen.sources["learner.enabled"] == "--no-learn"
    assert chosen.sources["engine.max_batch"] == "--set"
    assert "serve.port" in chosen.named
    assert "trace.topk" not in chosen.named


def test_no_drafter_is_a_kind_and_not_a_model() -> None:
    config = read("--drafter", "none").config
    assert (config.drafter.kind, config.drafter.model) == ("none", Config().drafter.model)


def test_sources_name_who_decided(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("engine: {max_batch: 2, max_queue: 16}\nhome: /h\n")
    environ = {"REDRAFT_ENGINE_MAX_QUEUE": "17", "REDRAFT_TRACE_TOPK": "8"}
    chosen = read("--config", str(file), "--set", "trace.topk=9", environ=environ)
    decided = {key: source for key, source in chosen.sources.items() if source != "default"}
    assert decided == {
        "engine.max_batch": str(file),
        "home": str(file),
        "engine.max_queue": "REDRAFT_ENGINE_MAX_QUEUE",
        "trace.topk": "--set",
    }
    assert (chosen.config.engine.max_queue, chosen.config.trace.topk) == (17, 9)


def test_the_shown_config_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "--gamma", "2", "--set", "learner.lora_targets=[q, v]", "--target", "a: #b"]) == 0
    shown = capsys.readouterr().out
    again = config_from_dict(yaml.safe_load(shown))
    assert (again.drafter.gamma, again.learner.lora_targets, again.target.model) == (2, ("q", "v"), "a: #b")
    assert next(line for line in shown.splitlines() if "gamma: 2" in line).endswith("# --gamma")
    assert next(line for line in shown.splitlines() if line.startswith("home:")).endswith("# REDRAFT_HOME")


# Mistakes and endings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "--gamma", "fast"], "drafter.gamma: 'fast' is not"),
        (["config", "--set", "engine.max_batc=2"], "Did you mean engine.max_batch?"),
        (["config", "--set", "gamma"], "--set: 'gamma' has no ="),
        (["config", "--config", "/absent.yaml"], "--config: cannot read /absent.yaml"),
        (["status"], "nothing runs in"),
        (["doctor"], "Start it with `redraft up`."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == cli.REFUSED
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("redraft: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["nonsense"], ["config", "--nonsense"], ["config", "--targ", "x"]])
def test_a_wrong_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.run(words)
    assert raised.value.code == 2


def command(monkeypatch: pytest.MonkeyPatch, main: Callable[[Any], int | None]) -> None:
    """Registers a subcommand `probe` as if it were one of ours."""
    module = SimpleNamespace(main=main, add_arguments=lambda parser: parser.add_argument("--word"))
    monkeypatch.setitem(sys.modules, "ops.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("ops.probe", "a probe"))


def raises(error: BaseException) -> Callable[[Any], int]:
    def main(_: Any) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (lambda arguments: None, 0),
        (lambda arguments: 7 if arguments.word == "x" else 0, 7),
        (raises(KeyboardInterrupt()), cli.INTERRUPTED),
        (raises(ConfigError("a", "b", "c")), cli.REFUSED),
        (raises(ServiceDown("redis is away")), cli.REFUSED),
        (raises(RedraftError("no")), cli.REFUSED),
    ],
)
def test_how_a_command_ends_is_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[Any], int | None], code: int
) -> None:
    command(monkeypatch, main)
    assert cli.run(["probe", "--word", "x"]) == code


def test_a_defect_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.run(["probe"])


def test_only_the_chosen_command_is_imported() -> None:
    code = "import sys; from ops.cli import run; run(['config']); print([m for m in sys.modules if m == 'ops.status'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_says_what_holds_where_a_flag_is_not_given(name: str) -> None:
    """A file that is not named is not read or written, and what is repeatable is empty: that goes without saying."""
    for parser in parsers_of(cli._parser(name), name):
        formatter = parser._get_formatter()
        for action in parser._actions:
            said = formatter._expand_help(action) if action.help else ""
            assert said, f"{action.option_strings or action.dest} has no help"
            speaks = action.required or action.nargs == 0 or action.metavar == "FILE" or "repeatable" in said
            assert speaks or "default" in said, f"{action.option_strings}: {said}"


def parsers_of(root: ArgumentParser, name: str) -> Iterator[ArgumentParser]:
    """That of the command, and those of its actions."""
    [commands] = [action for action in root._actions if isinstance(action, _SubParsersAction)]
    parser = commands.choices[name]
    actions = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    yield from (sub for action in actions for sub in action.choices.values())
    if not actions:
        yield parser


@pytest.mark.parametrize("name", ["up", "status", "config"])
def test_help_names_the_keys(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.run([name, "--help"])
    assert raised.value.code == 0
    assert "(target.model; default: " in " ".join(capsys.readouterr().out.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.run(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith("redraft ")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'from ops.cli import main; main([\"config\"])' | head -1",
        shell=True, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("home:")
    assert done.stderr == ""


# The home of a running stack


def running(home: Path, *, redis: str = "redis://127.0.0.1:1/0", pid: int | None = None) -> RunningStack:
    stack = RunningStack("http://127.0.0.1:9", "http://127.0.0.1:2", redis, pid or os.getpid(), {"redis": 1}, 5.0)
    write_run_file(home, stack)
    return stack


def test_a_home_is_one_stacks_own(tmp_path: Path) -> None:
    with owned_home(tmp_path):
        stack = running(tmp_path)
        assert read_run_file(tmp_path) == stack
        with (
            pytest.raises(ConfigError, match=rf"home: another stack runs in .* \(process {os.getpid()}, http"),
            owned_home(tmp_path),
        ):
            pass
    assert read_run_file(tmp_path) is None
    with owned_home(tmp_path):
        pass


def test_a_stack_that_was_killed_does_not_count(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with owned_home(tmp_path):
        running(tmp_path, pid=dead.pid)
        assert read_run_file(tmp_path) is None


# Status


# As `Replica.status` and the learner's loop have them.
REPLICA = {
    "running": 3,
    "waiting": 2,
    "blocks_free": 60,
    "blocks_total": 64,
    "drafter_version": "v2",
    "draining": False,
}
LEARNER = {
    "state": "attempt 4: training",
    "trouble": [],
    "attempts": 4,
    "promotions": 2,
    "refusals": 1,
    "decision": "kept: a gain of 0.002 is within noise",
    "next": "",
    "fresh_tokens": 12345,
    "drift": {"sql": 0.31},
    "kept": {"sql": {"train": 40, "judge": 2}},
    "mlflow": {"waiting": 0, "given_up": 5, "trouble": ""},
}


@pytest.fixture
def busy(redis_url: str, tmp_path: Path) -> Iterator[list[str]]:
    """Words for `redraft status` on a store with something of everything; the API does not answer."""
    prefix = f"test-{uuid4().hex}"
    store = Store(redis_url, prefix)
    store.set_champion(Champion("v2", "b", "base", "t:fp16", "eagle3", 2, "v1", 1.0))
    store.append_trace(b"x", max_bytes=10**6)
    for replica, accepted in (("r0", 3), ("r1", 4)):
        fields = {"accepted|domain=sql|version=v2": accepted, "tested|domain=sql|version=v2": 10, "steps": 2}
        fields["traces_dropped"] = 7
        store.put_counters(replica, "e", fields)
        store.put_status(f"app#{replica}", REPLICA, ttl_s=60)
    store.put_status("learner", LEARNER, ttl_s=60)
    home = tmp_path / "home"
    with owned_home(home):
        running(home, redis=redis_url)
        yield ["status", "--set", f"redis.prefix={prefix}"]


def test_status_counts_and_does_not_divide(busy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*busy, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["domains"] == [{"domain": "sql", "version": "v2", "accepted": 7, "tested": 20}]
    assert report["champion"]["version"] == "v2"
    assert report["learner"] == LEARNER
    assert sorted(report["replicas"]) == ["app#r0", "app#r1"]
    assert report["stream"] == {"length": 1, "pending": 0, "lag": 1, "trimmed_unread": 0, "dead": 0}
    assert report["counters"]["steps"] == 4
    assert report["api"]["status"] == 0


def test_status_tells_people_what_they_ask_for(
    busy: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.run(busy) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "│ sql │ v2 │ 7 │ 20 │ 0.350 │",
        "│ r0 │ v2 │ serving │ 3 │ 2 │ 60 of 64 │",
        "v2 (no. 2), promoted",
        "attempt 4: training",
        "4, of which 2 promoted; the last 1 refused",
        "kept: a gain of 0.002 is within noise",
        "none is due",
        "12,345 since the last attempt",
        "sql 0.31",
        "sql 42",
        "│ to be read │ 1, and 0 read but not yet kept",
        "14 traces that a replica had no room for",  # seven of each replica
        "5 entries given up on the way to MLflow",
        "no answer",
    ):
        assert words in shown, shown
    for internal in ("{", "_", "true", "null"):
        assert internal not in shown


def test_status_without_a_learner_and_traffic(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with owned_home(tmp_path / "home"):
        running(tmp_path / "home", redis=redis_url)
        assert cli.run(["status", "--set", f"redis.prefix=test-{uuid4().hex}"]) == 0
    shown = capsys.readouterr().out
    for words in ("nothing drafted yet", "no heartbeat", "the base drafter", "it does not run", "none"):
        assert words in shown


def test_status_without_redis_is_still_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with owned_home(tmp_path / "home"):
        running(tmp_path / "home")
        assert cli.run(["status"]) == status.NOTHING_RUNS
    assert "refused" in capsys.readouterr().out
