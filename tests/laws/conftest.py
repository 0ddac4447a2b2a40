"""Benches that are built once: a byte-level target for text, and one of 16 tokens whose distribution can be listed."""

from __future__ import annotations

import pytest

from tests.tiny_engine import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), vocab=320)


@pytest.fixture(scope="session")
def small_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("small-bench"), vocab=16)
