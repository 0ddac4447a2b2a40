"""The local stack: each part by itself, and the whole of it (without a model) however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ops import local_redis
from ops.local_mlflow import start_mlflow
from ops.local_redis import find_server, start_redis
from ops.prepare import Preparation
from ops.processes import Supervisor
from ops.stack import Stack
from shared.config import Config, config_from_flat
from shared.errors import ConfigError, RedraftError
from shared.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs") as supervisor:
        yield supervisor


def config_in(home: Path, **values: object) -> Config:
    return config_from_flat({"home": str(home), **{key.replace("__", "."): value for key, value in values.items()}})


# Redis


def test_the_local_redis_never_evicts_and_stays_off_the_disk(supervisor: Supervisor, tmp_path: Path) -> None:
    url = start_redis(supervisor, config_in(tmp_path, redis__maxmemory=200 * 2**20))
    store = Store(url, "test")
    assert store.server_facts().policy == "noeviction"
    assert store.server_facts().version >= local_redis.LEAST_VERSION
    command = " ".join(psutil.Process(supervisor.children[0].pid).cmdline())
    assert url.startswith("redis://127.0.0.1:")
    assert str(find_server()) in command


def test_a_given_redis_is_used_as_it_is(supervisor: Supervisor, tmp_path: Path, redis_url: str) -> None:
    assert start_redis(supervisor, config_in(tmp_path, redis__url=redis_url)) == redis_url
    assert supervisor.children == []


def test_a_given_redis_that_does_not_answer_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: no answer"):
        start_redis(supervisor, config_in(tmp_path, redis__url="redis://127.0.0.1:1/0"))


def test_a_given_redis_that_evicts_is_refused(supervisor: Supervisor, tmp_path: Path) -> None:
    url = start_redis(supervisor, config_in(tmp_path))
    store = Store(url, "test")
    store._link.run(lambda client: client.config_set("maxmemory-policy", "allkeys-lru"))
    with pytest.raises(ConfigError, match="may evict the champion"):
        start_redis(supervisor, config_in(tmp_path, redis__url=url))


def script(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_a_server_on_the_path_is_preferred_if_it_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = find_server()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    old = script(tmp_path, "redis-server", "Redis server v=6.2.14 sha=0:0")
    assert find_server() == embedded
    monkeypatch.setattr(local_redis, "_embedded_server", lambda: None)
    with pytest.raises(ConfigError, match=rf"redis\.url: no Redis server .*{old} is 6\.2.*apt install"):
        find_server()
    new = script(tmp_path, "valkey-server", "Valkey server v=8.1.0 sha=0:0")
    assert find_server() == new


# MLflow


def test_the_local_mlflow_answers_to_its_own_names_only(supervisor: Supervisor, tmp_path: Path) -> None:
    url = start_mlflow(supervisor, config_in(tmp_path))
    port = url.rpartition(":")[2]

    def ask(host: str) -> int:
        request = urllib.request.Request(
            f"{url}/api/2.0/mlflow/experiments/search?max_results=1", headers={"Host": host}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert ask(f"127.0.0.1:{port}") == 200
    assert ask(f"localhost:{port}") == 200
    assert ask("evil.example") == 403
    assert (tmp_path / "mlflow" / "mlflow.db").is_file()
    # The command and its one web worker; job workers would be seven more, of 230 MB each.
    assert len(psutil.Process(supervisor.children[0].pid).children(recursive=True)) == 1


def test_a_given_tracking_server_is_used_as_it_is(supervisor: Supervisor, tmp_path: Path) -> None:
    config = config_in(tmp_path, mlflow__tracking_uri="http://mlflow.example:5000")
    assert start_mlflow(supervisor, config) == "http://mlflow.example:5000"
    assert supervisor.children == []


# Before the start


def test_a_target_that_does_not_exist_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"target: there is no folder \./nowhere"):
        Preparation(config_in(tmp_path, target__model="./nowhere")).wait()


def test_a_stack_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    stack = Stack(config_in(tmp_path, redis__url="redis://127.0.0.1:1/0"))
    with pytest.raises(ConfigError, match=r"redis\.url"):
        stack.__enter__()
    assert stack.supervisor.children == []
    assert not (tmp_path / "run" / "stack.json").exists()
    with pytest.raises(ConfigError, match=r"redis\.url"):  # and not: the home is taken
        stack.__enter__()


# The whole stack


@dataclass
class Up:
    process: subprocess.Popen[str]
    home: Path

    @property
    def urls(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.home / "run" / "stack.json").read_text())
        return found

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def left(self, family: list[psutil.Process], *, within_s: float) -> list[str]:
        _, alive = psutil.wait_procs(family, timeout=within_s)
        return [" ".join(process.cmdline())[:80] for process in alive if process.status() != "zombie"]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """`redraft up` on a scripted engine, in a process group of its own as a terminal would have it."""
    environment = {**os.environ, "REDRAFT_HOME": str(tmp_path / "h"), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_AUTH_MODE", None)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.ops.fake_up", "--port", "0"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    said = ""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said += line
            if "redraft status" in line:
                break
        else:
            raise AssertionError(said)
        yield Up(process, tmp_path / "h")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        (signal.SIGINT, True, 130),  # Ctrl-C reaches everything in the terminal's foreground
        (signal.SIGTERM, False, 143),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_stack(up: Up, number: signal.Signals, whole_group: bool, code: int) -> None:
    family = up.family()
    assert len(family) >= 10  # Redis, MLflow, Ray's daemons, Serve, the replica
    (os.killpg if whole_group else os.kill)(up.process.pid, number)
    said, _ = up.process.communicate(timeout=90)
    assert up.process.returncode == code
    assert "Traceback" not in said
    assert up.left(family, within_s=30) == []
    if number != signal.SIGKILL:
        assert not (up.home / "run" / "stack.json").exists()


@pytest.mark.slow
def test_a_stack_serves_and_mends_its_neighbours(up: Up) -> None:
    urls = up.urls
    with urllib.request.urlopen(f"{urls['api']}/v1/models", timeout=30) as answer:
        assert json.load(answer)["data"][0]["id"] == "tiny"
    store = Store(urls["redis"], "redraft")
    assert store.ping()
    redis = json.loads((up.home / "run" / "stack.json").read_text())["children"]["redis"]
    os.kill(redis, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        try:
            assert store.ping()
            break
        except RedraftError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    environment = {**os.environ, "REDRAFT_HOME": str(up.home)}
    shown = subprocess.run(
        [sys.executable, "-c", "from ops.cli import main; main(['status', '--json'])"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(shown)["api"]["answer"]["status"] == "ready"
    second = subprocess.run(
        [sys.executable, "-c", "from ops.cli import main; main(['up'])"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert second.returncode == 2
    assert re.search(rf"home: another stack runs in .* \(process {up.process.pid}, {urls['api']}\)", second.stderr)
