"""One stack for the tests of a module: a tiny target, a head with random weights, and everything else as in earnest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveStack, start_stack
from tests.learner.traffic import VOCAB, TinyServing
from tests.tiny import SPECIAL


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("closed-loop"), **{"drafter.swap_poll_s": 0.1})


@pytest.fixture(scope="module")
def stack(serving: TinyServing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    folder: Path = tmp_path_factory.mktemp("up")
    with start_stack(serving.config, folder, VOCAB - len(SPECIAL)) as stack:
        yield stack
