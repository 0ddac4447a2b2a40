"""What a valid body becomes for the engine, and what the probes and the model list say."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serving.api.router import create_app
from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL

pytestmark = pytest.mark.anyio

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "x"}


async def _complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    answer = await http.post("/v1/completions", json=TEXT | fields)
    assert answer.status_code == 200, answer.text
    return answer


async def _chat(http: httpx.AsyncClient, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": list(messages)} | fields)
    assert answer.status_code == 200, answer.text
    return answer


async def test_defaults_are_openais(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    await _complete(http)
    request = loop.seen[0]
    assert request.params.max_tokens == 16
    assert (request.params.sampling.temperature, request.params.sampling.top_p) == (1.0, 1.0)
    assert (request.params.sampling.top_k, request.params.sampling.min_p) == (0, 0.0)
    assert (request.params.seed, request.params.sampling.seeded) == (None, False)
    assert request.params.speculative
    assert not request.params.ignore_eos
    assert (request.domain, request.tenant) == ("default", "default")


async def test_a_chat_answer_may_fill_the_context(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    await _chat(http, {"role": "user", "content": "Hello"})
    request = loop.seen[0]
    assert len(request.prompt_ids) + request.params.max_tokens == loop.context


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_either_limit_of_chat(http: httpx.AsyncClient, loop: FakeLoop, field: str) -> None:
    answer = await _chat(http, {"role": "user", "content": "Hello"}, **{field: 2})
    assert loop.seen[0].params.max_tokens == 2
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
async def test_every_seed_of_the_api_is_a_seed(http: httpx.AsyncClient, loop: FakeLoop, seed: int) -> None:
    await _complete(http, seed=seed)
    assert loop.seen[0].params.seed == seed
    assert loop.seen[0].params.sampling.seeded


async def test_greedy(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    await _complete(http, temperature=0)
    assert loop.seen[0].params.sampling.greedy


@pytest.mark.parametrize(("stop", "expected"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ())])
async def test_stop(http: httpx.AsyncClient, loop: FakeLoop, stop: Any, expected: tuple[str, ...]) -> None:
    await _complete(http, stop=stop)
    assert loop.seen[0].params.stop == expected


async def test_every_form_of_a_prompt(http: httpx.AsyncClient, loop: FakeLoop, tokenizer: Any) -> None:
    ids = tokenizer("two words")["input_ids"]
    for prompt, choices in (("two words", 1), (["two words"], 1), (ids, 1), ([ids], 1), (["two words"] * 2, 2)):
        loop.seen.clear()
        answer = await _complete(http, prompt=prompt)
        assert [request.prompt_ids for request in loop.seen] == [tuple(ids)] * choices
        assert len({request.id for request in loop.seen}) == choices
        assert answer.json()["usage"]["prompt_tokens"] == len(ids) * choices


async def test_chat_goes_through_the_models_template(http: httpx.AsyncClient, loop: FakeLoop, tokenizer: Any) -> None:
    await _chat(
        http,
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
    )
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nOne\nTwo<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(loop.seen[0].prompt_ids) == expected


async def test_the_domain_reaches_the_engine_and_the_body_cannot_name_the_tenant(
    http: httpx.AsyncClient, loop: FakeLoop
) -> None:
    metadata = {"domain": "sql", "team": "any text = fine | here"}
    await _chat(http, {"role": "user", "content": "x"}, metadata=metadata, user="acme")
    assert (loop.seen[0].domain, loop.seen[0].tenant) == ("sql", "default")


async def test_an_answer_names_its_request(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    assert (await _complete(http)).json()["id"] == loop.seen[0].id


async def test_fingerprint_follows_target_and_weight_format(http: httpx.AsyncClient, service: Service) -> None:
    from dataclasses import replace

    backend = service.backend()
    assert (await _complete(http)).json()["system_fingerprint"] == backend.system_fingerprint
    assert replace(backend, fingerprint="ab12:int8").system_fingerprint != backend.system_fingerprint
    assert replace(backend, numerics="torch 3").system_fingerprint != backend.system_fingerprint


async def test_probes_of_a_ready_replica(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz")).json()["status"] == "ok"
    ready = await http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json() == {
        "status": "ready",
        "replica": "replica-1",
        "model": MODEL,
        "target": "ab12:fp16",
        "drafter_version": "v7",
        "running": 0,
        "waiting": 0,
        "blocks": {"free": 60, "total": 64},
    }


@pytest.mark.parametrize("state", ["loading", "draining", "failed"])
async def test_probes_of_a_replica_that_does_not_serve(service: Service, loop: FakeLoop, state: str) -> None:
    if state == "loading":
        service = Service("replica-2")
    elif state == "draining":
        service.drain()
    else:
        service.fail("why")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://test") as http:
        assert (await http.get("/healthz")).status_code == 200
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["status"] == state
        assert (await http.get("/v1/models")).status_code == 503


async def test_models(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"] == [(await http.get(f"/v1/models/{MODEL}")).json()]
    assert listed["data"][0]["max_model_len"] == loop.context


async def test_openapi_names_what_is_honoured_and_the_envelope(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/healthz", "/readyz"} <= set(document["paths"])
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "speculative" in fields
    assert fields["suffix"]["enum"] == [None, ""]  # all that may be sent of what is not supported
    assert "ErrorEnvelope" in document["components"]["schemas"]
    assert "HTTPValidationError" not in document["components"]["schemas"]  # we never answer in that form
