"""However many domains clients name, few are told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from serving.api.domains import DEFAULT, OTHER, Domains
from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL


def test_first_come_first_counted() -> None:
    domains = Domains(2)
    assert [domains.place(name) for name in ("sql", "chat", "law", "sql")] == ["sql", "chat", OTHER, "sql"]
    assert domains.place(DEFAULT) == DEFAULT  # takes no place
    assert len({domains.place(f"d{number}") for number in range(1000)}) == 1


@pytest.mark.anyio
async def test_what_is_refused_takes_no_place(http: httpx.AsyncClient, service: Service, loop: FakeLoop) -> None:
    service.open(replace(service.backend(), domains=Domains(1)))

    async def ask(domain: str, **fields: Any) -> int:
        body = {"model": MODEL, "prompt": "x", "metadata": {"domain": domain}} | fields
        return (await http.post("/v1/completions", json=body)).status_code

    assert await ask("wrong", max_tokens=10**6) == 400
    assert [await ask(domain) for domain in ("sql", "law", "default")] == [200] * 3
    assert [request.domain for request in loop.seen] == ["sql", "other", "default"]
