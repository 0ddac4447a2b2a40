"""The API over the real engine and a tiny model: the two fit, and a client's departure gives its blocks back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from serving.api.router import create_app
from serving.replica import Replica
from shared.config import config_from_flat
from tests.serving.api.conftest import service_of
from tests.serving.api.test_tools import TEMPLATE
from tests.tiny import build_tiny_model

pytestmark = pytest.mark.anyio

KV_TOKENS, BLOCK = 1024, 16


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    home = tmp_path_factory.mktemp("home")
    config = config_from_flat(
        {
            "home": str(home),
            "target.model": str(build_tiny_model(home / "tiny", positions=4096)),
            "target.device": "cpu",
            "target.dtype": "fp32",
            "drafter.kind": "none",
            "engine.kv_tokens": KV_TOKENS,
            "engine.block_size": BLOCK,
            "engine.max_batch": 4,
            "engine.max_queue": 4,
            "engine.threads": 1,
        }
    )
    replica = Replica(config, "replica-1")
    replica.start()
    yield replica
    replica.stop()


@pytest.fixture
async def http(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service_of(replica)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 12,
    } | fields


async def test_a_stream_says_what_the_whole_answer_says(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/chat/completions", json=chat(ignore_eos=True))).json()
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["choices"][0]["finish_reason"] == "length"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await http.post("/v1/chat/completions", json=chat(ignore_eos=True, **options))
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert whole["metrics"]["speculative_decoding"]["num_spec_steps"] == 0  # there is no drafter


async def test_every_seed_decodes(http: httpx.AsyncClient) -> None:
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        body = chat(seed=seed, temperature=1.0)
        first, second = [(await http.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
        assert first["choices"] == second["choices"]


async def test_a_chat_without_a_limit_may_use_all_that_the_cache_holds(http: httpx.AsyncClient) -> None:
    body = chat(ignore_eos=True, max_tokens=None)
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == KV_TOKENS  # less than the model's 4,096 positions
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_too_long_names_both_numbers(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=chat(max_tokens=KV_TOKENS))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(KV_TOKENS) in error["message"]


async def test_a_list_that_overfills_the_queue_is_refused_whole(http: httpx.AsyncClient, replica: Replica) -> None:
    body = {"model": "tiny", "prompt": ["x"] * 4, "max_tokens": 200, "ignore_eos": True}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(6)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert all(
        answer.json()["error"]["code"] == "rate_limit_exceeded" for answer in answers if answer.status_code == 429
    )
    await until_free(replica)


async def test_leaving_gives_the_blocks_back(http: httpx.AsyncClient, replica: Replica) -> None:
    for stream, n in ((False, 1), (True, 1), (False, 3), (True, 3)):
        body = chat(ignore_eos=True, max_tokens=KV_TOKENS // 3 - 100, stream=stream, n=n)
        request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        while replica.loop.snapshot().running < n:
            await asyncio.sleep(0.005)
        request.cancel()
        await until_free(replica)


async def test_choices_of_a_seed_differ_and_repeat(http: httpx.AsyncClient) -> None:
    body = chat(seed=3, temperature=1.0, n=3, ignore_eos=True)
    first, second = [(await http.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["message"]["content"] for choice in second["choices"]] == texts
    assert len(set(texts)) == 3  # twelve tokens of a flat distribution over 320
    alone = (await http.post("/v1/chat/completions", json=body | {"n": 1})).json()
    assert alone["choices"][0]["message"]["content"] == texts[0]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rom"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "flights")]


@pytest.mark.parametrize("seed", [1, 2])
async def test_structured_answers_are_what_was_asked_for(http: httpx.AsyncClient, seed: int) -> None:
    formats: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, ""),
        ({"structured_outputs": {"json": SCHEMA}}, ""),
        ({"structured_outputs": {"regex": "(ab|c)d{2}"}}, "(ab|c)d{2}"),
        ({"structured_outputs": {"choice": ["a.b", "c|d"]}}, r"a\.b|c\|d"),
        ({"structured_outputs": {"grammar": 'start: "x" NUMBER\nNUMBER: /[1-9][0-9]/'}}, "x[1-9][0-9]"),
    ]
    for fields, pattern in formats:
        body = chat(seed=seed, temperature=1.5, max_tokens=200, **fields)
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop", (fields, text)
        if pattern:
            assert re.fullmatch(pattern, text)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("named", [True, False])
async def test_a_forced_call_comes_from_any_model(
    http: httpx.AsyncClient, replica: Replica, monkeypatch: pytest.MonkeyPatch, named: bool, parallel: bool
) -> None:
    monkeypatch.setattr(replica.loaded.tokenizer, "chat_template", TEMPLATE)
    choice = {"type": "function", "function": {"name": "flights"}} if named else "required"
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    # A seed with which the list of calls, which has no end of its own, is closed in time.
    body = chat(seed=1, temperature=0.3, max_tokens=400, logit_bias={str(id_of(replica, "]")): 20}, **fields)
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [told] = answer.json()["choices"]
    assert told["finish_reason"] == "tool_calls"
    calls = told["message"]["tool_calls"]
    assert len(calls) >= 1
    assert parallel or len(calls) == 1
    for call in calls:
        assert call["function"]["name"] in (["flights"] if named else ["weather", "flights"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def id_of(replica: Replica, text: str) -> int:
    [id] = replica.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "cat"}}}}, None),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"structured_outputs": {"grammar": "no grammar"}}, None),
        ({"structured_outputs": {"json": "[]"}}, None),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused_by_its_field(
    http: httpx.AsyncClient, replica: Replica, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(replica.loaded.tokenizer, "chat_template", TEMPLATE)
    if param == "tools":
        fields["tools"][0]["function"]["parameters"] = {"$ref": "#/$defs/missing"}
    answer = await http.post("/v1/chat/completions", json=chat(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == (param or next(iter(fields)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_is_outgrown_in_the_middle_is_the_requests_own_fault(
    http: httpx.AsyncClient, replica: Replica, stream: bool
) -> None:
    """The library compiles an object of so many names that may each follow, and gives up in front of the first."""
    names = {"type": "object", "properties": {f"name{i}": {"type": "integer"} for i in range(600)}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": names | {"additionalProperties": False}}}
    quote = {str(id_of(replica, '"')): 100}
    answer = await http.post("/v1/chat/completions", json=chat(response_format=named, logit_bias=quote, stream=stream))
    assert answer.status_code == (200 if stream else 400), answer.text
    last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert (error["type"], error["code"], error["param"]) == (
        *("invalid_request_error", "invalid_grammar"),
        "response_format",
    )
    assert "cannot be followed any further" in error["message"]
    await until_free(replica)


async def test_logprobs_ids_and_text_of_a_stream_are_those_of_the_whole(http: httpx.AsyncClient) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "seed": 4, "temperature": 1.0}
    fields |= {"stop": ["e"], "ignore_eos": True, "max_tokens": 40}
    whole = (await http.post("/v1/chat/completions", json=chat(**fields))).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == len(whole["token_ids"])
    assert all(token["logprob"] < 0 for token in content)
    assert all(token["top_logprobs"][0]["logprob"] >= token["logprob"] for token in content)
    streamed = await http.post("/v1/chat/completions", json=chat(stream=True, **fields))
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.strip().split("\n\n")[:-1]]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    assert [id for choice in choices for id in choice.get("token_ids", [])] == whole["token_ids"]
    parts = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert [token["token"] for part in parts for token in part] == [token["token"] for token in content]


async def test_the_prompts_own_logprobs_are_those_of_generating_it(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    said = (await http.post("/v1/completions", json=body | {"prompt": "abc", "max_tokens": 7})).json()["choices"][0]
    prompt, generated = said["prompt_token_ids"], said["token_ids"]
    again = body | {"prompt": prompt + generated[:6], "max_tokens": 1, "echo": True}
    read = (await http.post("/v1/completions", json=again)).json()["choices"][0]
    assert read["token_ids"] == generated[6:]  # that rows of the prompt are wanted moves no other
    logprobs = read["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert logprobs[len(prompt) :] == pytest.approx(said["logprobs"]["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_an_answer_that_would_go_on(
    http: httpx.AsyncClient, replica: Replica, stream: bool
) -> None:
    body = chat(ignore_eos=True, max_tokens=KV_TOKENS - 100, timeout=0.2, stream=stream)
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code == 408:  # a busy machine: not even one token
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    else:
        assert '"finish_reason":"deadline"' in answer.text
    await until_free(replica)


async def until_free(replica: Replica) -> None:
    for _ in range(1000):
        now = replica.loop.snapshot()
        if not now.running and not now.waiting and now.blocks_free == now.blocks_total:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("blocks were not given back")
