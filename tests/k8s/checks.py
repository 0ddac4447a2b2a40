"""All that is checked of a built overlay; `problems` is empty for one that may be applied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from tests.k8s import references, schemas, security, serve_config
from tests.k8s.kustomize import ROOT, Document
from tests.k8s.references import Secrets

PAGE = ROOT / "docs" / "kubernetes.md"


def problems(documents: Sequence[Document]) -> list[str]:
    if found := list(schemas.problems(documents)):
        return found  # the other checks rely on the shapes
    secrets = documented_secrets()
    return [
        *references.problems(documents, secrets),
        *security.problems(documents, secrets),
        *serve_config.problems(documents, secrets),
    ]


@cache
def documented_secrets() -> Secrets:
    """Name -> keys of every Secret that the page tells the engineer to create."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if match := re.search(r"create secret generic ([a-z-]+)(.*)", line):
            keys = re.findall(r"--from-(?:literal|file)=([\w.-]+)=", match[2])
            found[match[1]] = frozenset(keys) | found.get(match[1], frozenset())
    return found
