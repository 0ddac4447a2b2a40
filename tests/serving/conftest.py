"""A bench for the engine's and the drafters' tests."""

from __future__ import annotations

import pytest

from tests.tiny_engine import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), vocab=320)
