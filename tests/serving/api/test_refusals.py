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
from tests.serving.api.conftest import MODEL, VOCABULARY

pytestmark = pytest.mark.anyio

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "x"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
UNSUPPORTED, UNKNOWN, TYPE, VALUE = "unsupported_parameter", "unknown_parameter", "invalid_type", "invalid_value"

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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


# What is added to the smallest valid completion, the parameter blamed, the code.
COMPLETION_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "logprobs", VALUE),
    ({"logprobs": True}, "logprobs", TYPE),
    ({"prompt_logprobs": -1}, "prompt_logprobs", VALUE),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", VALUE),
    ({"echo": 1}, "echo", TYPE),
    ({"echo": True, "logprobs": 0, "stream": True}, "echo", VALUE),  # the prompt's come at the end
    ({"suffix": "end"}, "suffix", UNSUPPORTED),
    ({"best_of": 0}, "best_of", VALUE),
    ({"best_of": 1, "n": 2}, "best_of", VALUE),
    ({"best_of": 2, "stream": True}, "best_of", VALUE),
    ({"best_of": 9}, "best_of", VALUE),  # more than the queue holds
    ({"n": 0}, "n", VALUE),
    ({"n": 9}, "n", VALUE),
    ({"n": 3, "prompt": ["a", "b", "c"]}, "n", VALUE),
    ({"n": True}, "n", TYPE),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", VALUE),
    ({"logit_bias": {"five": 1}}, "logit_bias.five", VALUE),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", VALUE),
    ({"logit_bias": [5]}, "logit_bias", TYPE),
    ({"presence_penalty": 2.5}, "presence_penalty", VALUE),
    ({"frequency_penalty": "high"}, "frequency_penalty", TYPE),
    ({"repetition_penalty": 0}, "repetition_penalty", VALUE),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", VALUE),
    ({"min_tokens": -1}, "min_tokens", VALUE),
    ({"min_tokens": 17}, "min_tokens", VALUE),  # more than max_tokens, which is 16 when left out
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", VALUE),
    ({"stop_token_ids": 5}, "stop_token_ids", TYPE),
    ({"return_token_ids": "yes"}, "return_token_ids", TYPE),
    ({"priority": 101}, "priority", VALUE),
    ({"priority": 0.5}, "priority", TYPE),
    ({"timeout": 0}, "timeout", VALUE),
    ({"timeout": "1s"}, "timeout", TYPE),
    ({"structured_outputs": {}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", VALUE),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", TYPE),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", VALUE),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend", UNKNOWN),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        VALUE,
    ),
    ({"tools": []}, "tools", UNKNOWN),  # a field of chat
    ({"messages": []}, "messages", UNKNOWN),
    ({"max_completion_tokens": 5}, "max_completion_tokens", UNKNOWN),
    ({"temprature": 0.5}, "temprature", UNKNOWN),
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": None}, "model", TYPE),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": [""]}, "prompt", "empty_prompt"),
    ({"prompt": ["x", ""]}, "prompt", "empty_prompt"),
    ({"prompt": [[]]}, "prompt", "empty_prompt"),
    ({"prompt": None}, "prompt", TYPE),
    ({"prompt": 5}, "prompt", TYPE),
    ({"prompt": {"text": "x"}}, "prompt", TYPE),
    ({"prompt": [True]}, "prompt", TYPE),
    ({"prompt": ["x", 5]}, "prompt[1]", TYPE),
    ({"prompt": [5, "x"]}, "prompt[1]", TYPE),
    ({"prompt": [[5], ["x"]]}, "prompt[1][0]", TYPE),
    ({"prompt": [-1]}, "prompt[0]", VALUE),
    ({"prompt": [VOCABULARY]}, "prompt", VALUE),
    ({"prompt": ["x"] * 9}, "prompt", VALUE),  # more than the queue holds
    ({"prompt": "\ud800"}, "prompt", VALUE),
    ({"model": "\ud800"}, "model", "model_not_found"),
    ({"stop": "\udfff"}, "stop", VALUE),
    ({"(strange)": 1}, "(strange)", UNKNOWN),
    ({"prompt": "x" * 300}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": 1.5}, "max_tokens", TYPE),
    ({"max_tokens": "5"}, "max_tokens", TYPE),
    ({"max_tokens": True}, "max_tokens", TYPE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": -0.1}, "temperature", VALUE),
    ({"temperature": "hot"}, "temperature", TYPE),
    ({"temperature": float("nan")}, "temperature", VALUE),
    ({"temperature": float("inf")}, "temperature", VALUE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_p": 1.1}, "top_p", VALUE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"min_p": 1.5}, "min_p", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"seed": "1"}, "seed", TYPE),
    ({"stop": ""}, "stop", VALUE),
    ({"stop": 5}, "stop", TYPE),
    ({"stop": ["a", 5]}, "stop[1]", TYPE),
    ({"stop": ["a", ""]}, "stop[1]", VALUE),
    ({"stop": [str(number) for number in range(17)]}, "stop", VALUE),
    ({"stream": "yes"}, "stream", TYPE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", UNKNOWN),
    ({"stream": True, "stream_options": True}, "stream_options", TYPE),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    ({"speculative": "no"}, "speculative", TYPE),
    ({"ignore_eos": 1}, "ignore_eos", TYPE),
    ({"user": 5}, "user", TYPE),
    ({"metadata": {"domain": 5}}, "metadata.domain", TYPE),
    ({"metadata": {"domain": ""}}, "metadata.domain", VALUE),
    ({"metadata": {"domain": "a|b=c"}}, "metadata.domain", VALUE),
    ({"metadata": {"domain": "sql\n"}}, "metadata.domain", VALUE),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", VALUE),
    ({"metadata": ["sql"]}, "metadata", TYPE),
]
CHAT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 1}, "logprobs", TYPE),
    ({"top_logprobs": 3}, "top_logprobs", VALUE),  # without logprobs
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", VALUE),
    ({"best_of": 1}, "best_of", UNKNOWN),  # a field of completions
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", VALUE),
    ({"tools": [TOOL, TOOL]}, "tools", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "two words"}}]}, "tools[0].function.name", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, "tools", VALUE),  # nothing would hold it
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"tools": [TOOL]}, "tools", "tools_not_supported"),  # the template writes none
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "some", "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice", TYPE),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice.type", VALUE),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": "json"}, "response_format", TYPE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"modalities": ["audio"]}, "modalities", UNSUPPORTED),
    ({"reasoning_effort": "low"}, "reasoning_effort", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"service_tier": "flex"}, "service_tier", UNSUPPORTED),
    ({"safety_identifier": "x"}, "safety_identifier", UNSUPPORTED),
    ({"echo": False}, "echo", UNKNOWN),  # a field of completions
    ({"prompt": "x"}, "prompt", UNKNOWN),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", VALUE),
    ({"max_completion_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"messages": []}, "messages", VALUE),
    ({"messages": "hello"}, "messages", TYPE),
    ({"messages": ["hello"]}, "messages[0]", TYPE),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", TYPE),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", VALUE),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "Bo"}]},
        "messages[1].name",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight", UNKNOWN),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].type",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "5"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        VALUE,
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "tools_not_supported"),
]


# JSON can escape half of a surrogate pair, which is no text; and a name may look like something else in a path.
HALF, SHOWN = "\ud800", "\\ud800"
SCHEMA_OF: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": HALF}}}
STRANGE_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({HALF: 1}, SHOWN, UNKNOWN),
    ({f"a{HALF}": HALF}, f"a{SHOWN}", UNKNOWN),
    ({"zzz": HALF}, "zzz", UNKNOWN),
    ({"": 1}, "", UNKNOWN),
    ({"model": HALF}, "model", "model_not_found"),
    ({"prompt": ["a", HALF]}, "prompt[1]", VALUE),
    ({"stop": HALF}, "stop", VALUE),
    ({"user": HALF}, "user", VALUE),
    ({"temperature": HALF}, "temperature", TYPE),
    ({"suffix": HALF}, "suffix", UNSUPPORTED),
    ({"metadata": {HALF: "a"}}, f"metadata.{SHOWN}", VALUE),
    ({"metadata": {"a": HALF}}, "metadata.a", VALUE),
    ({"logit_bias": {HALF: 1}}, f"logit_bias.{SHOWN}", VALUE),
    ({"logit_bias": {"(x)": 1}}, "logit_bias.(x)", VALUE),
    ({"stream": True, "stream_options": {HALF: 1}}, f"stream_options.{SHOWN}", UNKNOWN),
    ({"stream": True, "stream_options": {"(x)": 1}}, "stream_options.(x)", UNKNOWN),
    ({"structured_outputs": {"regex": HALF}}, "structured_outputs.regex", VALUE),
    ({"structured_outputs": {"json": {HALF: 1}}}, "structured_outputs.json", VALUE),
    ({"structured_outputs": {"json": json.dumps({"const": HALF})}}, "structured_outputs.json", VALUE),
]
STRANGE_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": HALF, "content": "x"}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": "user", "content": HALF}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": "x", HALF: 1}]}, f"messages[0].{SHOWN}", UNKNOWN),
    ({"messages": [{"role": "user", "content": "x", "(user)": 1}]}, "messages[0].(user)", UNKNOWN),
    ({"response_format": {"type": HALF}}, "response_format.type", VALUE),
    ({"response_format": SCHEMA_OF}, "response_format.json_schema.schema", VALUE),
    ({"tools": [{**TOOL, "function": {"name": HALF}}]}, "tools[0].function.name", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {HALF: 1}}}]}, "tools[0].function.parameters", VALUE),
    ({"tools": [TOOL], "tool_choice": HALF}, "tool_choice", VALUE),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": json.dumps({"a": HALF})}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        VALUE,
    ),
]


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
