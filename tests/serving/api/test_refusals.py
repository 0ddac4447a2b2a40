"""Whatever is refused is refused by name, with the right status, in OpenAI's envelope."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.refused import (
    CHAT,
    CHAT_CASES,
    COMPLETION_CASES,
    STRANGE_CHAT,
    STRANGE_TEXT,
    TEXT,
    UNKNOWN,
    VALUE,
)

pytestmark = pytest.mark.anyio


def assert_envelope(answer: httpx.Response, status: int, code: str | None, param: str | None = None) -> str:
    body = answer.json()
    assert answer.status_code == status, body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == kinds.get(status, "invalid_request_error")
    assert (error["code"], error["param"]) == (code, param), error
    return str(error["message"])


@pytest.mark.parametrize(("extra", "param", "code"), [*STRANGE_TEXT, *STRANGE_CHAT])
async def test_any_text_of_json_is_refused_by_the_right_name(
    http: httpx.AsyncClient, loop: FakeLoop, extra: Any, param: str, code: str
) -> None:
    chat = (extra, param, code) in STRANGE_CHAT
    answer = await http.post(f"/v1/{'chat/' * chat}completions", **_json((CHAT if chat else TEXT) | extra))
    assert_envelope(answer, 404 if code == "model_not_found" else 400, code, param)
    assert not loop.seen


@given(name=st.text(st.characters(codec=None)), nested=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
async def test_an_unknown_field_of_any_name_is_named(http: httpx.AsyncClient, name: str, nested: bool) -> None:
    strange = f"{name}?"  # so that it is no field of ours
    extra = {"stream": True, "stream_options": {strange: 1}} if nested else {strange: 1}
    answer = await http.post("/v1/completions", **_json(TEXT | extra))
    shown = strange.encode("utf-8", "backslashreplace").decode()
    assert_envelope(answer, 400, UNKNOWN, f"stream_options.{shown}" if nested else shown)


@pytest.mark.parametrize(("extra", "param", "code"), COMPLETION_CASES)
async def test_completions(http: httpx.AsyncClient, loop: FakeLoop, extra: Any, param: str, code: str) -> None:
    answer = await http.post("/v1/completions", **_json(TEXT | extra))
    message = assert_envelope(answer, 404 if code == "model_not_found" else 400, code, param)
    assert param.split("[")[0].split(".")[0] in message or code in ("empty_prompt", "model_not_found")
    assert not loop.seen


@pytest.mark.parametrize(("extra", "param", "code"), CHAT_CASES)
async def test_chat(http: httpx.AsyncClient, loop: FakeLoop, extra: Any, param: str, code: str) -> None:
    answer = await http.post("/v1/chat/completions", **_json(CHAT | extra))
    assert_envelope(answer, 400, code, param)
    assert not loop.seen


NEUTRAL_TEXT: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": None,
    "min_tokens": 0,
    "n": 1,
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "presence_penalty": 0,
    "suffix": None,
    "temperature": None,
    "max_tokens": None,
    "stop": None,
    "stream": False,
    "user": None,
    "metadata": None,
}
NEUTRAL_CHAT: dict[str, Any] = {
    "logprobs": False,
    "response_format": {"type": "text"},
    "tools": None,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "n": None,
    "service_tier": "auto",
    "store": False,
    "top_logprobs": 0,
}


async def test_neutral_values_ask_for_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/completions", json=TEXT | NEUTRAL_TEXT)).status_code == 200
    assert (await http.post("/v1/chat/completions", json=CHAT | NEUTRAL_CHAT)).status_code == 200


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_what_is_missing_is_named(http: httpx.AsyncClient, missing: str) -> None:
    body = {name: value for name, value in TEXT.items() if name != missing}
    answer = await http.post("/v1/completions", json=body)
    assert_envelope(answer, 400, "missing_required_parameter", missing)


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"model": "tiny",}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"model": "\xff"}', {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[" * 200_000, {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[]", {"content-type": "application/json"}, 400, "invalid_type"),
        (b'"x"', {"content-type": "application/json"}, 400, "invalid_type"),
        (b"null", {"content-type": "application/json"}, 400, "invalid_type"),
        (b"", {"content-type": "application/json"}, 400, "invalid_type"),
        (json.dumps(TEXT).encode(), {"content-type": "text/plain"}, 415, "unsupported_content_type"),
        (json.dumps(TEXT).encode(), {}, 415, "unsupported_content_type"),
        (b"x=1", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_content_type"),
        (b" " * (16 * 2**20 + 1), {"content-type": "application/json"}, 413, "request_too_large"),
    ],
)
async def test_bodies_that_are_no_request(
    http: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await http.post("/v1/completions", content=content, headers=headers)
    assert_envelope(answer, status, code)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),  # it would load scripts from elsewhere
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("DELETE", "/v1/models", 405, "method_not_supported"),
        ("POST", "/healthz", 405, "method_not_supported"),
    ],
)
async def test_routes(http: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    answer = await http.request(method, path)
    assert_envelope(answer, status, code)
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(http: httpx.AsyncClient, loop: FakeLoop, stream: bool) -> None:
    loop.max_queue = 0
    answer = await http.post("/v1/completions", json=TEXT | {"stream": stream})
    assert_envelope(answer, 429, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_not_ready_is_503_with_retry_after(http: httpx.AsyncClient, loop: FakeLoop, path: str) -> None:
    loop.draining = True
    answer = await http.post(path, json=CHAT if "chat" in path else TEXT)
    assert_envelope(answer, 503, "not_ready")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [("fail_after", 500, "internal_error"), ("cancel_after", 503, "not_ready"), ("break_after", 500, "internal_error")],
)
async def test_what_fails_before_the_first_token_is_an_http_error(
    http: httpx.AsyncClient, loop: FakeLoop, fault: str, status: int, code: str, stream: bool
) -> None:
    setattr(loop, fault, 0)
    answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    message = assert_envelope(answer, status, code)
    assert "defect" not in message  # what a defect says is for the log


@pytest.mark.parametrize(
    ("fault", "code"),
    [("fail_after", "internal_error"), ("cancel_after", "not_ready"), ("break_after", "internal_error")],
)
async def test_what_fails_in_a_stream_is_its_last_event(
    http: httpx.AsyncClient, loop: FakeLoop, fault: str, code: str
) -> None:
    setattr(loop, fault, 2)
    answer = await http.post("/v1/completions", json=TEXT | {"stream": True})
    assert answer.status_code == 200
    *pieces, last = answer.text.strip().split("\n\n")
    assert len(pieces) == 2
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == code
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [0, 2])
async def test_a_failure_that_is_the_requests_own_is_a_400(
    http: httpx.AsyncClient, loop: FakeLoop, stream: bool, said: int
) -> None:
    loop.fail_after, loop.fail_code = said, "invalid_grammar"
    fields = {"response_format": {"type": "json_object"}, "stream": stream}
    answer = await http.post("/v1/completions", json=TEXT | fields)
    if stream and said:
        assert answer.status_code == 200
        assert "[DONE]" not in answer.text
        error = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"], error["param"]) == (
            *("invalid_request_error", "invalid_grammar"),
            "response_format",
        )
    else:
        assert_envelope(answer, 400, "invalid_grammar", "response_format")


async def test_a_client_that_left_breaks_nothing(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    loop.token_s = 0.05
    sent: list[dict[str, Any]] = []
    body = [json.dumps(TEXT).encode()]

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    transport = http._transport
    assert isinstance(transport, httpx.ASGITransport)
    await transport.app(scope, receive, send)  # type: ignore[arg-type]
    assert loop.cancelled == [request.id for request in loop.seen] != []
    assert sent[0]["status"] == 499


async def test_one_failing_choice_cancels_the_others(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    loop.fail_after, loop.token_s = 1, 0.01
    answer = await http.post("/v1/completions", json=TEXT | {"prompt": ["a", "b", "c"]})
    assert_envelope(answer, 500, "internal_error")
    assert not loop.running


async def test_without_a_chat_template_chat_is_refused(
    http: httpx.AsyncClient, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert_envelope(await http.post("/v1/chat/completions", json=CHAT), 400, "no_chat_template", "messages")


async def test_what_the_template_refuses_is_the_clients_error(
    http: httpx.AsyncClient, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no two users in a row') }}")
    message = assert_envelope(await http.post("/v1/chat/completions", json=CHAT), 400, VALUE, "messages")
    assert "no two users in a row" in message


async def test_loading_and_failed_replicas_say_so(http: httpx.AsyncClient, service: Service) -> None:
    service.fail("no such folder")
    answer = await http.post("/v1/completions", json=TEXT)
    assert "no such folder" in assert_envelope(answer, 503, "not_ready")


def _json(body: dict[str, Any]) -> dict[str, Any]:
    """httpx arguments; the standard encoder writes NaN and lone surrogates, as careless clients do."""
    return {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
