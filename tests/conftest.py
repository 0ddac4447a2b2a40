"""Fixtures that several packages' tests need: a real Redis server for the session, a fresh store for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ops.local_redis import find_server, launch_server
from ops.processes import Supervisor
from shared.store import Store


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests share; take a prefix of your own."""
    folder: Path = tmp_path_factory.mktemp("redis")
    with Supervisor(folder) as supervisor:
        yield launch_server(supervisor, find_server(), maxmemory=128 * 2**20)


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    store = Store(redis_url, f"test-{uuid4().hex}")
    yield store
    store.close()
