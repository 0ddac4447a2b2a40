"""Several answers to one prompt, log-probabilities, echoes, token ids, deadlines: what is shown and what is counted."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import httpx
import pytest

from serving.api.admission import seed_of
from serving.api.replies import ChatCompletion, Completion
from serving.api.service import Service
from tests.fakes import SCRIPT, STATS, FakeLoop
from tests.serving.api.conftest import MODEL
from tests.serving.api.test_refusals import assert_envelope

pytestmark = pytest.mark.anyio

WORDS = len(SCRIPT.split(" "))
CHAT = [{"role": "user", "content": "x"}]


async def text(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "say it", "max_tokens": 64} | fields)
    assert answer.status_code == 200, answer.text
    Completion.model_validate_json(answer.content)  # the documented shape, nothing more and nothing less
    return dict(answer.json())


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT} | fields)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content)
    return dict(answer.json())


async def chunks(http: httpx.AsyncClient, path: str = "completions", **fields: Any) -> list[dict[str, Any]]:
    prompt = {"messages": CHAT} if path == "chat/completions" else {"prompt": "say it", "max_tokens": 64}
    answer = await http.post(f"/v1/{path}", json={"model": MODEL, "stream": True} | prompt | fields)
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


# What reaches the engine


async def test_every_parameter_reaches_the_engine(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    await text(
        http,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 2.5},
        min_tokens=3,
        stop_token_ids=[9, 4],
        logprobs=2,
        prompt_logprobs=1,
        timeout=2.5,
        priority=-3,
        structured_outputs={"regex": "a+"},
    )
    params = loop.seen[0].params
    sampling = params.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert sampling.constrained
    assert (params.min_tokens, params.stop_token_ids) == (3, (9, 4))
    assert (params.logprobs, params.prompt_logprobs) == (2, 1)
    assert (params.deadline_s, params.priority) == (2.5, -3)
    assert params.grammar is not None
    assert params.grammar.text == "a+"


async def test_what_is_left_out_costs_the_engine_nothing(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    await chat(http, n=None, logprobs=False, response_format={"type": "text"}, min_tokens=0)
    params = loop.seen[0].params
    assert (params.logprobs, params.prompt_logprobs, params.grammar, params.deadline_s) == (None, None, None, None)
    assert not params.sampling.constrained


async def test_choices_of_one_seed_have_seeds_of_their_own(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    for _ in range(2):
        await text(http, prompt=["a", "b"], n=3, seed=-5)
    seeds = [request.params.seed for request in loop.seen]
    assert seeds[:3] == [-5, seed_of(-5, 1), seed_of(-5, 2)]
    assert len(set(seeds[:3])) == 3
    assert seeds == seeds[:3] * 4  # each prompt, each time
    assert all(-(2**63) <= seed_of(seed, 1) < 2**63 for seed in range(64))
    assert len({request.id for request in loop.seen[:6]}) == 6


# Several choices


async def test_a_prompt_is_billed_once_and_every_choice_is(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    answer = await text(http, prompt=["one two three", "x"], n=2, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    lengths = [len(request.prompt_ids) for request in loop.seen]
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]  # choices of a prompt stand together
    assert answer["usage"]["prompt_tokens"] == lengths[0] + lengths[2]
    assert answer["usage"]["completion_tokens"] == 4 * 5
    drafted = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert drafted == 4 * STATS.num_draft_tokens


async def test_best_of_shows_the_likeliest_and_bills_all(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    answer = await text(http, best_of=3, n=2, logprobs=0, max_tokens=4)
    assert len(loop.seen) == 3
    shown = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert shown == [[-0.25] * 4, [-0.5] * 4]  # the fake's third and first, the better one in front
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12
    unasked = await text(http, best_of=2)
    assert unasked["choices"][0]["logprobs"] is None  # they were for choosing only


async def test_choices_are_interleaved_in_a_stream(http: httpx.AsyncClient) -> None:
    texts, ends, order = {0: "", 1: "", 2: ""}, {}, []
    for chunk in await chunks(http, "chat/completions", n=3):
        [choice] = chunk["choices"]
        order.append(choice["index"])
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            assert choice["index"] not in ends
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == dict.fromkeys(texts, SCRIPT)
    assert ends == dict.fromkeys(texts, "stop")
    assert order != sorted(order)


# Log-probabilities


async def test_logprobs_of_completions(http: httpx.AsyncClient) -> None:
    answer = await text(http, prompt=["a", "b", "say it"], logprobs=2, max_tokens=3)
    logprobs = answer["choices"][2]["logprobs"]
    assert logprobs["tokens"] == ["<|start|>", "<|end|>", "!"]  # the fake's ids are 1, 2 and 3
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["top_logprobs"][0] == {"<|start|>": -0.25, "<|end|>": -1.25}
    assert logprobs["text_offset"] == [0, len("<|start|>"), len("<|start|><|end|>")]


async def test_logprobs_of_chat(http: httpx.AsyncClient) -> None:
    answer = await chat(http, logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("<|start|>", -0.5, list(b"<|start|>"))
    assert [(top["token"], top["logprob"]) for top in second["top_logprobs"]] == [("<|end|>", -0.5), ("!", -1.5)]
    alone = await chat(http, logprobs=True, max_tokens=1)
    assert alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert (await chat(http))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_has_the_logprobs_and_ids_of_the_whole(http: httpx.AsyncClient, path: str) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "logprobs": 1}
    if path == "completions":
        whole = (await text(http, **fields))["choices"][0]
        streamed = [chunk["choices"][0] for chunk in await chunks(http, path, **fields)]
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [choice["logprobs"][name] for choice in streamed if choice["logprobs"]]
            # The second request of a fake has other numbers.
            assert name == "token_logprobs" or list(chain(*parts)) == whole["logprobs"][name]
        assert [choice["prompt_token_ids"] for choice in streamed if "prompt_token_ids" in choice] == [
            whole["prompt_token_ids"]
        ]
    else:
        fields |= {"logprobs": True, "top_logprobs": 1}
        answer = await chat(http, **fields)
        whole, events = answer["choices"][0], await chunks(http, path, **fields)
        streamed = [chunk["choices"][0] for chunk in events]
        parts = [choice["logprobs"]["content"] for choice in streamed if choice["logprobs"]]
        assert [token["token"] for token in chain(*parts)] == [token["token"] for token in whole["logprobs"]["content"]]
        assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in events[1:])
    assert list(chain(*(choice.get("token_ids", []) for choice in streamed))) == whole["token_ids"]
    assert whole["token_ids"] == list(range(1, WORDS + 1))


async def test_prompt_logprobs(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    choice = (await text(http, prompt_logprobs=1))["choices"][0]
    ids = loop.seen[0].prompt_ids
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(ids)
    [(id, entry)] = choice["prompt_logprobs"][1].items()
    assert (int(id), entry["logprob"], entry["rank"]) == (ids[1], -0.25, 1)
    beside = (await chat(http, prompt_logprobs=0))["prompt_logprobs"]
    assert [next(iter(entry.values()))["rank"] for entry in beside[1:]] == [None] * (len(beside) - 1)


# Echo


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_gives_the_prompt_as_it_was_sent(http: httpx.AsyncClient, tokenizer: Any, stream: bool) -> None:
    prompts = ["say it", "ä"]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for sent in (prompts, ids):
        if stream:
            texts = {0: "", 1: ""}
            for chunk in await chunks(http, prompt=sent, echo=True):
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert list(texts.values()) == [prompt + SCRIPT for prompt in prompts]
        else:
            answer = await text(http, prompt=sent, echo=True)
            assert [choice["text"] for choice in answer["choices"]] == [prompt + SCRIPT for prompt in prompts]


async def test_echo_with_logprobs_covers_the_prompt(http: httpx.AsyncClient, tokenizer: Any) -> None:
    prompt = "say ä"
    ids = tokenizer(prompt)["input_ids"]
    logprobs = (await text(http, prompt=prompt, echo=True, logprobs=1, max_tokens=2))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 2
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][len(ids)] == len(prompt)  # where the answer begins
    assert logprobs["tokens"][len(ids) - 1].startswith("bytes:")  # half of the umlaut


# Usage


async def test_usage_may_come_with_every_chunk(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *growing, last = await chunks(http, stream_options=options)
    assert last["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in growing]
    assert counts == [*range(1, WORDS + 1), WORDS]  # each word, then the end
    assert last["usage"] == growing[-1]["usage"]
    assert last["usage"]["prompt_tokens"] == len(loop.seen[0].prompt_ids)


# Deadlines


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_token_is_an_error(
    http: httpx.AsyncClient, loop: FakeLoop, stream: bool
) -> None:
    loop.deadline_after = 0
    body = {"model": MODEL, "messages": CHAT, "timeout": 0.1, "n": 2, "stream": stream}
    answer = await http.post("/v1/chat/completions", json=body)
    assert "timeout" in assert_envelope(answer, 408, "deadline_exceeded", "timeout")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_deadline_later_ends_the_answer(http: httpx.AsyncClient, loop: FakeLoop) -> None:
    loop.deadline_after = 2
    choice = (await text(http, timeout=9))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" ".join(SCRIPT.split(" ")[:2]), "deadline")
    streamed = await chunks(http, timeout=9)
    assert streamed[-1]["choices"][0]["finish_reason"] == "deadline"


# Documented


async def test_the_document_names_every_field(http: httpx.AsyncClient, service: Service) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False
    assert {"tools", "logit_bias", "timeout", "priority", "seed"} <= set(schemas["ChatCompletionRequest"]["properties"])
    whole = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(whole) == {"application/json", "text/event-stream"}
    assert whole["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
