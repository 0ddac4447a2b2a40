"""Tools, through the official client: what the template is given, and what comes back as calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL

TEMPLATE = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] + ' ' + call['function']['arguments']['city'] + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>\n' }}{% endfor %}{{ '<|start|>assistant\n' }}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "Weather?"}]
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CONTEXT = 4096


@pytest.fixture
def client(
    serve: Callable[[], str], service: Service, loop: FakeLoop, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[openai.OpenAI]:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    loop.context = CONTEXT
    service.open(replace(service.backend(), context=CONTEXT))
    with openai.OpenAI(base_url=serve() + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": MODEL, "messages": ASK, "tools": [WEATHER]} | fields))


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[dict[str, str]], str]:
    """(content, calls put together by index, reason) of choice 0."""
    content, calls, reason = "", list[dict[str, str]](), ""
    for chunk in ask(client, stream=True, **fields):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


def test_a_call_is_parsed(client: openai.OpenAI, loop: FakeLoop, tokenizer: Any) -> None:
    loop.script = f"Let me look. {CALL} {CALL}"
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"description": "The weather of a city"' in tokenizer.decode(loop.seen[0].prompt_ids)
    assert loop.seen[0].params.grammar is None  # auto leaves the choice to the model


def test_a_stream_says_the_same(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = f"Let me look. {CALL} {CALL}"
    content, calls, reason = streamed(client)
    assert (content, reason) == ("Let me look.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", ARGUMENTS)] * 2
    assert len({call["id"] for call in calls}) == 2


def test_a_call_alone_has_no_content(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = CALL
    assert ask(client).choices[0].message.content is None


def test_no_call_is_a_plain_answer(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = "It rains < always."
    message = ask(client).choices[0]
    assert (message.message.content, message.message.tool_calls, message.finish_reason) == (loop.script, None, "stop")
    assert streamed(client) == (loop.script, [], "stop")


def test_none_hides_the_tools_and_reads_no_calls(client: openai.OpenAI, loop: FakeLoop, tokenizer: Any) -> None:
    loop.script = CALL
    choice = ask(client, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert "# Tools" not in tokenizer.decode(loop.seen[0].prompt_ids)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_grammar(client: openai.OpenAI, loop: FakeLoop, choice: Any) -> None:
    loop.script = json.dumps([{"name": "weather", "arguments": {"city": "Oslo"}}])
    answer = ask(client, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert [call.function.arguments for call in answer.message.tool_calls] == [ARGUMENTS]
    grammar = loop.seen[0].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["$defs"]["tool0"] == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert streamed(client, tool_choice=choice)[1][0]["arguments"] == ARGUMENTS


def test_one_call_at_most(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = f"{CALL} {CALL}"
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(streamed(client, parallel_tool_calls=False)[1]) == 1


def test_a_cut_call_ends_with_length(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = CALL
    words = len(CALL.split(" "))
    choice = ask(client, max_tokens=words - 1).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city":'
    assert streamed(client, max_tokens=words - 1)[2] == "length"


def test_a_call_and_its_result_go_back_through_the_template(
    client: openai.OpenAI, loop: FakeLoop, tokenizer: Any
) -> None:
    loop.script = CALL
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain", "name": "weather"}
    ask(client, messages=[*ASK, message.model_dump(), result])
    prompt = tokenizer.decode(loop.seen[1].prompt_ids)
    assert "<tool_call>weather Oslo</tool_call>" in prompt  # arguments as an object, not as text
    assert "<|start|>tool\nrain<|end|>" in prompt


def test_each_choice_has_calls_of_its_own(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = CALL
    choices = ask(client, n=2).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    names: dict[int, list[str]] = {0: [], 1: []}
    for chunk in ask(client, n=2, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            names[chunk.choices[0].index] += [part.function.name] if part.function.name else []
    assert names == {0: ["weather"], 1: ["weather"]}


def test_logprobs_and_ids_of_a_call_are_all_there(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.script = f"Well, {CALL}"
    fields: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **fields).choices[0]
    words = len(loop.script.split(" "))
    assert len(whole.logprobs.content) == len(whole.model_extra["token_ids"]) == words
    tokens, ids = 0, list[int]()
    for chunk in ask(client, stream=True, **fields):
        choice = chunk.choices[0]
        tokens += len(choice.logprobs.content) if choice.logprobs else 0
        ids += (choice.model_extra or {}).get("token_ids", [])
    assert (tokens, ids) == (words, whole.model_extra["token_ids"])


def test_what_the_client_parses_itself(client: openai.OpenAI, loop: FakeLoop) -> None:
    """Structured output by a pydantic class, as the client's own `parse` does it."""
    from pydantic import BaseModel

    class Report(BaseModel):
        city: str
        rain: bool

    loop.script = '{"city": "Oslo", "rain": true}'
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Report)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == Report(city="Oslo", rain=True)
    grammar = loop.seen[0].params.grammar
    assert grammar is not None
    assert set(json.loads(grammar.text)["properties"]) == {"city", "rain"}
