"""The rules of the layout: who may import whom, which library has which door, and that nothing happens at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "serving", "learner", "ops")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Package -> the packages of ours that it may import, beside itself.
MAY_IMPORT = {
    "shared": set(),
    "serving": {"shared"},
    "learner": {"shared"},
    "ops": {"shared", "serving", "learner"},
}
# Library -> the files and folders through which alone it comes in.
DOORS = {
    "fastapi": ("serving/api/", "serving/app.py"),
    "starlette": ("serving/api/", "serving/app.py"),
    "ray": (
        "serving/app.py",
        "serving/features.py",
        "serving/metrics.py",
        "learner/app.py",
        "learner/metrics.py",
        "learner/rollout.py",
        "ops/",
    ),
    "redis": ("shared/redis_link.py",),
    "mlflow": ("learner/registry.py", "ops/"),
    "prometheus_client": ("serving/metrics.py", "learner/metrics.py"),
    "ray.serve.metrics": ("serving/metrics.py", "learner/metrics.py"),
    "ray.util.metrics": ("serving/metrics.py", "learner/metrics.py"),
}
MOST_LINES = 400


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports anywhere; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_import_only_what_they_may(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    forbidden = set(PACKAGES) - MAY_IMPORT[package] - {package} | {"tests"}
    assert [name for name in imports(path) if name.partition(".")[0] in forbidden] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_come_in_through_their_doors(path: Path) -> None:
    strangers = [
        name
        for name in imports(path)
        for library, doors in DOORS.items()
        if within(name, library) and not name_of(path).startswith(doors)
    ]
    assert strangers == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=name_of)
def test_a_package_file_is_its_docstring(path: Path) -> None:
    [statement] = ast.parse(path.read_text(encoding="utf-8")).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)
    assert isinstance(statement.value.value, str)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_opens_with_what_it_owns_and_stays_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    assert len(text.splitlines()) <= MOST_LINES


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert [name_of(path) for path in MODULES if path.stem in drawers or path.parent.name in drawers] == []


def test_the_command_starts_without_the_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "ray", "mlflow", "fastapi", "matplotlib")
    code = (
        "import sys\n"
        "import ops.cli, ops.up, ops.status, ops.show_config, ops.stack, shared.store, shared.config\n"
        f"print(*[name for name in {heavy!r} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


def test_importing_everything_reads_no_settings_and_configures_no_logging() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES if path.stem != "__init__"]
    code = (
        "import importlib, logging, os\n"
        "before = dict(os.environ)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert not [n for n in set(os.environ) - set(before) if n.startswith(('REDRAFT', 'RAY_AUTH', 'MLFLOW'))]\n"
        f"ours = [n for n in logging.root.manager.loggerDict if n.split('.')[0] in {PACKAGES!r}]\n"
        "assert not [n for n in ours if logging.getLogger(n).handlers], 'a handler was installed'\n"
    )
    # A setting that is wrong is noticed by load_config, not by an import.
    environment = {"PATH": "/usr/bin:/bin", "REDRAFT_NO_SUCH_KEY": "1", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
