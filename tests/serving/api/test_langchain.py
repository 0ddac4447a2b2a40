"""LangChain's client, where it is installed: it is much larger than what it would test here on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serving.api.service import Service
from tests.fakes import SCRIPT, FakeLoop
from tests.serving.api.conftest import MODEL
from tests.serving.api.test_tools import ARGUMENTS, CALL, CONTEXT, TEMPLATE, WEATHER

langchain = pytest.importorskip("langchain_openai", reason="`pip install langchain-openai` would run this")


@pytest.fixture
def chat(
    serve: Callable[[], str], service: Service, loop: FakeLoop, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    loop.context = CONTEXT
    service.open(replace(service.backend(), context=CONTEXT))
    return langchain.ChatOpenAI(base_url=serve() + "/v1", api_key="unused", model=MODEL, max_retries=0, timeout=20)


def test_answers_and_streams(chat: Any) -> None:
    answer = chat.invoke("What rises?")
    assert answer.content == SCRIPT
    assert answer.usage_metadata["output_tokens"] == len(SCRIPT.split(" "))
    assert "".join(chunk.content for chunk in chat.stream("What rises?")) == SCRIPT


def test_tools_go_there_and_back(chat: Any, loop: FakeLoop) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    loop.script = CALL
    bound = chat.bind_tools([WEATHER])
    answer = bound.invoke("Weather?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]
    loop.script = "It rains."
    result = ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage("Weather?"), answer, result]).content == "It rains."


def test_streamed_calls_add_up(chat: Any, loop: FakeLoop) -> None:
    loop.script = CALL
    whole: Any = None
    for chunk in chat.bind_tools([WEATHER]).stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"city": "Oslo"})]
    assert whole.response_metadata["finish_reason"] == "tool_calls"


def test_structured_output(chat: Any, loop: FakeLoop) -> None:
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str

    loop.script = ARGUMENTS
    assert chat.with_structured_output(Place).invoke("Where?") == Place(city="Oslo")
    assert loop.seen[0].params.grammar is not None


def test_logprobs(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("What rises?")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == len(SCRIPT.split(" "))
    assert len(content[0]["top_logprobs"]) == 2
