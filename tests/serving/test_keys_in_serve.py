"""API keys on a real Ray Serve, through its proxy, with a decoding replica: who may ask, and as whose request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from serving.app import deploy, shutdown
from shared.config import Config, config_from_flat
from shared.keys import changed_keys
from shared.store import Store
from shared.trace import TraceRecord, decode
from tests.e2e.live import until
from tests.serving.api.test_access import Keys
from tests.tiny import build_tiny_model

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def config(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    home = tmp_path_factory.mktemp("home")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    return config_from_flat(
        {
            "home": str(home),
            "target.model": str(build_tiny_model(home / "tiny")),
            "target.device": "cpu",
            "target.dtype": "fp32",
            "drafter.kind": "none",
            "learner.enabled": False,
            "engine.kv_tokens": 1024,
            "engine.threads": 1,
            "redis.url": redis_url,
            "redis.prefix": f"test-{uuid4().hex}",
            "serve.auth": "keys",
            "serve.port": port,
            "serve.replica_cpus": 0.1,
            "serve.drain_s": 5,
        }
    )


@pytest.fixture(scope="module")
def keys(config: Config) -> Keys:
    keys = Keys(config.keys_path)
    keys.add("web", "inference", tenant="acme")
    keys.add("scraper", "metrics", tenant="acme")
    return keys


@pytest.fixture(scope="module")
def http(ray_cluster: None, config: Config, keys: Keys) -> Iterator[httpx.Client]:
    deploy(config)
    with httpx.Client(base_url=f"http://127.0.0.1:{config.serve.port}", timeout=120) as client:
        yield client
    shutdown()


def ask(http: httpx.Client, header: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body, headers=header)


def test_the_proxy_lets_in_whom_the_keys_say(http: httpx.Client, keys: Keys) -> None:
    for header in ({}, {"authorization": "Bearer rd-wrong"}):
        refused = ask(http, header)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    narrow = ask(http, keys.header("scraper"))
    assert (narrow.status_code, narrow.json()["error"]["code"]) == (403, "insufficient_permissions")
    answered = ask(http, keys.header("web"))
    assert answered.status_code == 200
    assert answered.json()["usage"]["completion_tokens"] == 4
    assert http.get("/readyz").status_code == 200


def test_keys_are_rotated_without_a_restart(http: httpx.Client, keys: Keys) -> None:
    replica = http.get("/readyz").json()["replica"]
    old = keys.add("old", "inference")
    assert ask(http, old).status_code == 200
    new = keys.add("new", "inference")
    assert [ask(http, header).status_code for header in (old, new)] == [200, 200]
    with changed_keys(keys.path) as held:
        held[0] = held[0].without("old")
    assert [ask(http, header).status_code for header in (old, new)] == [401, 200]
    assert http.get("/readyz").json()["replica"] == replica


def test_a_trace_has_the_tenant_of_the_key(http: httpx.Client, keys: Keys, config: Config) -> None:
    keys.add("batch", "inference", tenant="globex")
    pretence = {"user": "initech", "metadata": {"tenant": "initech", "domain": "whose"}}
    asked = {
        name: ask(http, keys.header(name), **pretence).raise_for_status().json()["id"] for name in ("web", "batch")
    }
    store = Store(config.redis.url, config.redis.prefix)

    def traces() -> dict[str, TraceRecord]:
        records = (decode(data) for _, data in store.peek_traces("", count=1000))
        return {record.id: record for record in records if record.domain == "whose"}

    until(lambda: len(traces()) == 2, "traced")
    found = traces()
    store.close()
    assert {name: found[id].tenant for name, id in asked.items()} == {"web": "acme", "batch": "globex"}
    assert all(b"initech" not in repr(record).encode() for record in found.values())
