"""Fixtures of the learner's loop: the traffic of a tiny service, a loop's settings, and the store that they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import Config
from shared.store import Store
from tests.learner.loops import configured
from tests.learner.traffic import TinyServing


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("serving"))


@pytest.fixture
def loop_config(serving: TinyServing, tmp_path: Path, redis_url: str) -> Config:
    return configured(serving, tmp_path, redis_url)


@pytest.fixture
def loop_store(loop_config: Config) -> Iterator[Store]:
    found = Store(loop_config.redis.url, loop_config.redis.prefix)
    yield found
    found.close()
