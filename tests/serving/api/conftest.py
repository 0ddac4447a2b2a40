"""A service over the fake loop, reached in process (httpx) and over a real socket (the openai client)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from serving.api.router import create_app
from serving.api.service import Backend, Service
from serving.replica import Replica
from tests.fakes import FakeLoop
from tests.tiny import build_tiny_tokenizer

MODEL = "tiny"
VOCABULARY = 320


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tiny_tokenizer(VOCABULARY)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def service(loop: FakeLoop, tokenizer: Any) -> Service:
    service = Service("replica-1")
    backend = Backend(
        decoder=loop,
        tokenizer=tokenizer,
        name=MODEL,
        fingerprint="ab12:fp16",
        context=loop.context,
        token_count=VOCABULARY,
        most_prompts=loop.max_queue,
    )
    service.open(backend)
    return service


def service_of(replica: Replica) -> Service:
    """A service over a real engine, as the deployment opens it."""
    service, loaded = Service(replica.id), replica.loaded
    service.open(
        Backend(
            decoder=replica.loop,
            tokenizer=loaded.tokenizer,
            name=MODEL,
            fingerprint=loaded.fingerprint,
            context=replica.context,
            token_count=loaded.token_count,
            most_prompts=replica.config.engine.max_queue,
            numerics=replica.numerics,
        )
    )
    return service


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def serve(service: Service) -> Iterator[Callable[..., str]]:
    """Starts a real server, by default for `service` without keys, and returns its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: FastAPI | None = None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app or create_app(service), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline, "the test server did not start"
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)
