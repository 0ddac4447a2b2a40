"""Fixtures that several packages' tests need: a real Redis server and a Ray cluster for the session, a fresh store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ops.local_ray import init_patiently
from ops.local_redis import find_server, launch_server
from ops.processes import Supervisor
from shared.store import Store


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all tests share; take a prefix of your own."""
    folder: Path = tmp_path_factory.mktemp("redis")
    with Supervisor(folder) as supervisor:
        yield launch_server(supervisor, find_server(), maxmemory=128 * 2**20)


def pytest_configure() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # Ray reads it when it is first imported, by whichever test module that is
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # nohup and background shells leave these ignored, and children that tests send them to would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """This process is connected to a Ray of its own; name your actors."""
    import ray

    init_patiently(
        address="local",
        namespace="redraft",
        num_cpus=4,
        object_store_memory=128 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield
    ray.shutdown()


@pytest.fixture
def store(redis_url: str) -> Iterator[Store]:
    store = Store(redis_url, f"test-{uuid4().hex}")
    yield store
    store.close()
