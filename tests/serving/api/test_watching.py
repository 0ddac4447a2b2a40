"""Who may watch, and what a browser is allowed to do with the page."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from serving.api.router import create_app
from serving.api.service import Service
from serving.overview import Overview
from shared.keys import WatchedKeys
from shared.store import Store
from tests.serving.api.test_access import Keys
from tests.serving.api.test_refusals import assert_envelope
from tests.serving.test_overview import NOWHERE, own

pytestmark = pytest.mark.anyio


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.json")
    keys.add("web", "inference")
    keys.add("watcher", "metrics")
    return keys


@pytest.fixture
async def guarded(service: Service, keys: Keys) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, WatchedKeys(keys.path), Overview("replica-1", Store(NOWHERE, "x"), own))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/data"])
async def test_numbers_are_for_keys_with_the_scope_metrics(guarded: httpx.AsyncClient, keys: Keys, path: str) -> None:
    assert_envelope(await guarded.get(path), 401, "invalid_api_key")
    assert_envelope(await guarded.get(path, headers=keys.header("web")), 403, "insufficient_permissions")
    answer = await guarded.get(path, headers=keys.header("watcher"))
    assert answer.status_code == 200, "Redis is away, and that is said, not failed"
    assert answer.headers["cache-control"] == "no-store"


async def test_a_scraper_is_told_the_format(guarded: httpx.AsyncClient, keys: Keys) -> None:
    answer = await guarded.get("/metrics", headers=keys.header("watcher"))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "redraft_spec_decode_num_drafts_total{" in answer.text


async def test_the_page_is_open_and_says_nothing_of_the_service(guarded: httpx.AsyncClient) -> None:
    answer = await guarded.get("/dashboard")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "sql" not in answer.text  # the only domain that there is
    assert re.findall(r"(?:src|href)=\"(?!data:)|https?://(?!www\.w3\.org/2000/svg)|url\(|@import", answer.text) == []


async def test_the_page_may_run_its_own_script_and_talk_to_its_own_service_only(http: httpx.AsyncClient) -> None:
    answer = await http.get("/dashboard")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"], policy["form-action"]) == ("'none'", "'self'", "'none'")
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in answer.text, "what clients said is put in as text"


@pytest.mark.parametrize("after", ["-1", "nan", "inf", "x"])
async def test_a_time_that_is_none_is_refused(http: httpx.AsyncClient, after: str) -> None:
    assert (await http.get("/dashboard/data", params={"after": after})).status_code == 400
