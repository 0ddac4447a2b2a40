"""A named port must be free; another is avoided."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ops.ports import choose_port, free_port
from shared.errors import ConfigError

LOOPBACK = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


def test_a_free_port_is_taken_as_it_is() -> None:
    port = free_port()
    assert choose_port("serve.port", LOOPBACK, port, named=True) == port


def test_port_zero_is_any_port() -> None:
    assert choose_port("serve.port", LOOPBACK, 0, named=True) > 0


def test_a_default_port_in_use_is_avoided(taken: int) -> None:
    assert choose_port("serve.port", LOOPBACK, taken, named=False) not in (0, taken)


def test_a_named_port_in_use_is_named(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"serve\.port: port {taken} on {LOOPBACK} is in use"):
        choose_port("serve.port", LOOPBACK, taken, named=True)


def test_a_port_taken_on_one_address_is_not_free_on_all(taken: int) -> None:
    with pytest.raises(ConfigError, match="in use"):
        choose_port("serve.port", "0.0.0.0", taken, named=True)


def test_a_foreign_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"serve\.host: 203\.0\.113\.1"):
        choose_port("serve.port", "203.0.113.1", 8000, named=False)
