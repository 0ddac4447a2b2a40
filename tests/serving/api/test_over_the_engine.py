"""The API over the real engine and a tiny model: the two fit, and a client's departure gives its blocks back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from serving.api.router import create_app
from serving.api.service import Backend, Service
from serving.replica import Replica
from shared.config import config_from_flat
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
    service = Service("replica-1")
    loaded = replica.loaded
    service.open(
        Backend(
            decoder=replica.loop,
            tokenizer=loaded.tokenizer,
            name=loaded.name,
            fingerprint=loaded.fingerprint,
            context=replica.context,
            token_count=loaded.token_count,
            most_prompts=4,
        )
    )
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
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
    for stream in (False, True):
        body = chat(ignore_eos=True, max_tokens=KV_TOKENS - 100, stream=stream)
        request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        while not replica.loop.snapshot().running:
            await asyncio.sleep(0.005)
        request.cancel()
        await until_free(replica)


async def until_free(replica: Replica) -> None:
    for _ in range(1000):
        now = replica.loop.snapshot()
        if not now.running and not now.waiting and now.blocks_free == now.blocks_total:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("blocks were not given back")
