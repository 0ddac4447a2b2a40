"""The only door to redis-py: one client whose every failure is a ServiceDown, raised within about a second.

Owns timeouts, reconnection and the rule for a full server: whatever was being written, only traces are trimmed for
it, because `noeviction` protects the champion and the blobs, and traces are the one thing that may be lost.
It knows commands and scripts, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.errors import ConfigError, ServiceDown

T = TypeVar("T")

CONNECT_TIMEOUT_S = 1.0
READ_TIMEOUT_S = 1.5  # of one recv, not of a whole reply; blocking reads stay well below it


class NoGroup(Exception):
    """The consumer group is gone (the server came back empty); the stream recreates it. Never leaves `shared`."""


class ServerFull(ServiceDown):
    """The server has reached `maxmemory`."""


class RedisLink:
    """A lazily connected client of one server; safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that redis-py cannot read. Connects at the first command."""
        try:
            self.client = redis.Redis.from_url(
                url,
                protocol=2,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=READ_TIMEOUT_S,
                # A pooled connection that the server closed long ago is replaced at once. A timeout is not retried:
                # the command may have run, and a second XADD would be a second record.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:
            raise ConfigError("redis.url", str(error), "Write redis://HOST:PORT/0.") from error
        self.where = _without_password(url)

    def run(self, command: Callable[[redis.Redis], T]) -> T:
        """The command's result. Raises ServiceDown (ServerFull when out of memory) or NoGroup."""
        try:
            return command(self.client)
        except redis.RedisError as error:
            reason = str(error)
            if reason.startswith("NOGROUP") or "-NOGROUP" in reason:
                raise NoGroup(reason) from error
            if isinstance(error, redis.OutOfMemoryError) or "OOM command not allowed" in reason:
                raise ServerFull(
                    f"Redis at {self.where} is full ({reason}); raise redis.maxmemory or lower trace.stream_bytes"
                ) from error
            raise ServiceDown(f"Redis at {self.where}: {reason or type(error).__name__}") from error

    def script(self, source: str) -> Callable[..., Any]:
        """A Lua script as a function of `keys` and `args`; reloaded by itself after a server restart."""
        script = self.client.register_script(source)

        def call(keys: list[str], args: list[Any]) -> Any:
            return self.run(lambda _: script(keys=keys, args=args))

        return call

    def close(self) -> None:
        self.client.close()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname}:{parts.port or 6379}"
