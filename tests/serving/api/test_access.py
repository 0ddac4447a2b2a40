"""Who may ask for what, and as whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from serving.api.access import OPEN, scope_of
from serving.api.router import create_app
from serving.api.service import Service
from shared.keys import WatchedKeys, changed_keys
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL
from tests.serving.api.test_refusals import assert_envelope

pytestmark = pytest.mark.anyio

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "x"}


class Keys:
    """A keys file and the secrets of what is in it, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secrets: dict[str, str] = {}

    def add(self, name: str, *scopes: str, tenant: str = "acme") -> dict[str, str]:
        with changed_keys(self.path) as held:
            held[0], self.secrets[name] = held[0].with_new(name, scopes, tenant)
        return self.header(name)

    def header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[name]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.json")
    keys.add("web", "inference")
    return keys


@pytest.fixture
async def guarded(service: Service, keys: Keys) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, WatchedKeys(keys.path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_the_tenant_comes_from_the_key_alone(guarded: httpx.AsyncClient, keys: Keys, loop: FakeLoop) -> None:
    other = keys.add("batch", "inference", tenant="globex")
    body = TEXT | {"user": "initech", "metadata": {"tenant": "initech", "domain": "sql"}}
    for header in (keys.header("web"), other):
        assert (await guarded.post("/v1/completions", json=body, headers=header)).status_code == 200
    assert [(request.tenant, request.domain) for request in loop.seen] == [("acme", "sql"), ("globex", "sql")]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer rd-wrong"},
        {"authorization": b"Bearer \xff\xfe"},
        {"authorization": "Basic d2ViOng="},
    ],
)
async def test_without_a_key_that_counts_nothing_is_read(
    guarded: httpx.AsyncClient, loop: FakeLoop, header: Any
) -> None:
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        answer = await guarded.request(method, path, headers=header, content=b"not even JSON")
        assert_envelope(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert_envelope(await guarded.get("/nothing", headers=header), 401, "invalid_api_key")
    assert not loop.seen


async def test_a_key_is_good_for_its_scopes_only(guarded: httpx.AsyncClient, keys: Keys, loop: FakeLoop) -> None:
    for name in ("metrics", "admin"):
        header = keys.add(name, name)
        answer = await guarded.post("/v1/completions", json=TEXT, headers=header)
        assert "'inference'" in assert_envelope(answer, 403, "insufficient_permissions")
    for path in ("/metrics", "/admin", "/admin/drain"):
        answer = await guarded.get(path, headers=keys.header("web"))
        assert_envelope(answer, 403, "insufficient_permissions")
    assert not loop.seen


async def test_probes_are_open(guarded: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert (await guarded.get(path)).status_code == 200


async def test_keys_are_changed_while_serving(guarded: httpx.AsyncClient, keys: Keys) -> None:
    fresh = keys.add("new", "inference")
    assert (await guarded.get("/v1/models", headers=fresh)).status_code == 200
    with changed_keys(keys.path) as held:
        held[0] = held[0].without("web")
    assert (await guarded.get("/v1/models", headers=keys.header("web"))).status_code == 401
    assert (await guarded.get("/v1/models", headers=fresh)).status_code == 200


async def test_a_fitting_key_sees_what_is_wrong_with_its_request(guarded: httpx.AsyncClient, keys: Keys) -> None:
    header = keys.header("web")
    assert_envelope(await guarded.get("/nothing", headers=header), 404, "unknown_url")
    assert_envelope(await guarded.post("/v1/completions", json={}, headers=header), 400, MISSING, "model")


MISSING = "missing_required_parameter"


async def test_every_route_is_open_or_has_a_scope(service: Service) -> None:
    paths = {route.path for route in create_app(service).routes if isinstance(route, APIRoute)}
    assert {path for path in paths if scope_of(path) is None} <= OPEN
    assert scope_of("/v1") == scope_of("/v1/models/a/b") == "inference"
    assert scope_of("/v1x") is None


async def test_the_document_says_that_a_key_is_needed(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/healthz"]["get"]
