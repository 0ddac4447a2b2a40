"""The files that a run leaves: its JSON and `alpha.png`, and what is written in them of how they came about."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ops.demo_picture import Stretch, Swap, draw
from ops.demo_report import Run
from ops.demo_windows import tokens_at
from shared.errors import ConfigError

_PACKAGES = ("redraft", "torch", "transformers", "ray", "mlflow", "peft")


def require_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError before a run whose result could not be kept."""
    if path is None:
        return
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(flag, f"{path} cannot be written", "Name a file in a folder that exists and is yours.")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_picture(path: Path, run: Run, report: Mapping[str, Any], model: str) -> None:
    measurements = sorted(run.board.measurements, key=lambda m: m.finished_at)
    tokens = tokens_at(run.board.windows, [m.finished_at for m in measurements])
    swaps = [Swap(promotion.version, run.tokens_at(promotion.at)) for promotion in run.board.promotions]
    stretches = stretches_of(run, notes_of(report))
    draw(path, measurements, tokens, stretches, swaps, f"{model} under drifting traffic")


def stretches_of(run: Run, notes: Mapping[str, str]) -> list[Stretch]:
    """The traffic before the first drift, then one stretch for each; `notes` by domain."""
    drifts = sorted((at, domain) for domain, at in run.first_sent.items() if domain in run.drifted)
    starts = [run.tokens_at(at) for at, _ in drifts]
    end = run.board.windows[-1].tokens if run.board.windows else 0.0
    seen = dict.fromkeys(answer.domain for answer in run.answers)
    settled = [domain for domain in seen if domain not in run.drifted]
    found = [
        Stretch(domain, frozenset([domain]), start, end) for (_, domain), start in zip(drifts, starts, strict=True)
    ]
    if settled:
        found.insert(0, Stretch(" · ".join(settled), frozenset(settled), 0.0, end))
    ends = [stretch.start for stretch in found[1:]] + [end]
    return [replace(s, end=end, note=notes.get(s.label, "")) for s, end in zip(found, ends, strict=True)]


def notes_of(report: Mapping[str, Any]) -> dict[str, str]:
    """What each judged domain came to."""
    return {domain: _gain(report, domain) for domain in report["last_third"]}


def _gain(report: Mapping[str, Any], domain: str) -> str:
    if domain in report["unlearnt"]:
        return "too short to show learning"
    live, static = (report[f"alpha_{kind}_last_third"]["domains"][domain] for kind in ("live", "static"))
    return "" if live is None else f"{live - static:+.2f} over the last third"


def about(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Command, commit, versions, machine and settings: what it takes to do this again."""
    return {
        "command": " ".join(["redraft", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
        "settings": dict(settings),
    }


def _commit() -> str:
    """Empty outside of a checkout; a + says that files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
