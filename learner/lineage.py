"""Whose requests a version has learnt from: those of its own attempt, and of every version before it that it continued.

It stands in the manifest's origin, so it goes wherever the blob goes. A version that does not say, because a person
brought it or an earlier release made it, may have learnt from anybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.artifact import Artifact, Manifest, open_blob
from shared.errors import ArtifactError

ANYBODY = "*"  # no tenant can have this name
_KEY = "tenants"


def tenants_of(manifest: Manifest) -> frozenset[str]:
    named = manifest.origin.get(_KEY)
    return frozenset(map(str, named)) if isinstance(named, list | tuple) else frozenset({ANYBODY})


def origin_of(parent: Artifact | None, tenants: Iterable[str]) -> dict[str, list[str]]:
    """What the manifest of a version says that continues `parent` (None: the base) on these tenants' requests."""
    before = tenants_of(parent.manifest) if parent is not None else frozenset()
    return {_KEY: sorted(before.union(tenants))}


def learnt_from(manifest: Manifest, tenant: str) -> bool:
    """Whether it may have learnt from this tenant."""
    return bool(tenants_of(manifest) & {tenant, ANYBODY})


def blob_learnt_from(blob: bytes, tenant: str) -> bool:
    """Likewise; one that cannot be read may hold anything."""
    try:
        return learnt_from(open_blob(blob).manifest, tenant)
    except ArtifactError:
        return True
