"""Drafter versions as modules that can be judged: the base with one artifact installed, the last few kept.

A version that nobody has the artifact of any more is told apart from the base, never mistaken for it. It knows nothing
of who serves which version.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection

from learner.base import BASE_VERSION, Base
from learner.tuning import install
from learner.unroll import Drafter
from shared.artifact import Artifact
from shared.errors import ArtifactError

KEPT = 3  # modules beside the base

log = logging.getLogger(__name__)


class DrafterBank:
    """`find` gives the artifact of a version, or None."""

    def __init__(self, base: Base, find: Callable[[str], Artifact | None], *, kept: int = KEPT) -> None:
        self._base, self._find, self._kept = base, find, kept
        self._modules: OrderedDict[str, Drafter] = OrderedDict()

    def forget(self, versions: Collection[str]) -> None:
        for version in versions:
            self._modules.pop(version, None)

    def get(self, version: str) -> Drafter | None:
        """The module of a version, in eval mode; None for one that is not known."""
        if version in (BASE_VERSION, ""):
            return self._base.module
        if version in self._modules:
            self._modules.move_to_end(version)
            return self._modules[version]
        artifact = self._find(version)
        if artifact is None:
            return None
        module = self._base.copy()
        try:
            install(module, artifact)
        except ArtifactError as error:
            log.error("version %s cannot be installed: %s", version, error)
            return None
        self._modules[version] = module
        while len(self._modules) > self._kept:
            self._modules.popitem(last=False)
        return module
