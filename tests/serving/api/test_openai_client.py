"""The official client, unchanged, against a real socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.fakes import SCRIPT, STATS, FakeLoop
from tests.serving.api.conftest import MODEL

WORDS = len(SCRIPT.split(" "))
EXPECTED_METRICS = {
    "mean_acceptance_length": 1 + 3 / 2,
    "draft_acceptance_rate": 3 / 6,
    "acceptance_histogram": [1, 0, 0, 1, 0],  # 0 to 4 of at most 4 drafts
    "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "4": [0, 0, 0, 1, 0]},
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 4,
    "alpha": 3 / 5,
    "tested": 5,
    "drafter_version": "v7",
}
CHAT = [{"role": "user", "content": "What rises?"}]


@pytest.fixture
def client(serve: Callable[[], str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serve() + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Say it", max_tokens=64)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert abs(answer.created - time.time()) < 60
    assert answer.choices[0].text == SCRIPT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == WORDS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + WORDS
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"] == {"speculative_decoding": EXPECTED_METRICS}


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == SCRIPT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"] == {"speculative_decoding": EXPECTED_METRICS}


def test_an_answer_can_be_sent_back_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT)
    history = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content == SCRIPT


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="Say it", max_tokens=64, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * WORDS + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_stream_with_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    *chunks, last = client.completions.create(
        model=MODEL, prompt="Say it", max_tokens=64, stream=True, stream_options=options
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == WORDS
    assert last.model_extra is not None
    assert last.model_extra["metrics"] == {"speculative_decoding": EXPECTED_METRICS}
    assert all("metrics" not in (chunk.model_extra or {}) for chunk in chunks)


def test_chat_stream_opens_with_the_role_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True})
    )
    first, *middle, closing, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == SCRIPT
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert closing.choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == WORDS
    assert last.model_extra is not None
    assert last.model_extra["metrics"] == {"speculative_decoding": EXPECTED_METRICS}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_several_prompts_are_several_choices(client: openai.OpenAI, loop: FakeLoop) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two", "three"], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens == sum(len(request.prompt_ids) for request in loop.seen)
    assert answer.model_extra is not None
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] == 3 * STATS.num_draft_tokens  # counters add up, ratios do not
    assert speculation["alpha"] == EXPECTED_METRICS["alpha"]
    assert speculation["acceptance_histogram"] == [3, 0, 0, 3, 0]


def test_several_prompts_in_a_stream(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=64, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: SCRIPT, 1: SCRIPT}
    assert reasons == {0: "stop", 1: "stop"}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "redraft"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other/model")
    assert refused.value.code == "model_not_found"


def test_extra_body_reaches_the_engine(client: openai.OpenAI, loop: FakeLoop) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="x",
        seed=5,
        user="team-a",
        extra_body={
            "metadata": {"domain": "sql"},
            "speculative": False,
            "top_k": 7,
            "min_p": 0.1,
            "ignore_eos": True,
        },
    )
    request = loop.seen[0]
    assert (request.domain, request.tenant) == ("sql", "default")  # whose it is, only a key can say
    assert (request.params.speculative, request.params.ignore_eos, request.params.seed) == (False, True, 5)
    sampling = request.params.sampling
    assert (sampling.top_k, sampling.min_p, sampling.seeded, sampling.temperature) == (7, 0.1, True, 1.0)
    assert answer.model_extra is not None
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_spec_steps"] == 0
    assert speculation["alpha"] is None  # nothing was tested: no ratio to show
    assert speculation["mean_acceptance_length"] is None


@pytest.mark.parametrize(
    ("status", "raised"), [("Overloaded", openai.RateLimitError), ("NotReady", openai.InternalServerError)]
)
def test_refusals_are_the_clients_own_exceptions(
    client: openai.OpenAI, loop: FakeLoop, status: str, raised: type[openai.APIStatusError]
) -> None:
    if status == "Overloaded":
        loop.max_queue = 0
    else:
        loop.draining = True
    with pytest.raises(raised) as refused:
        client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_failure_in_a_stream_raises_in_the_client_after_what_was_said(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.fail_after = 2
    said: list[str] = []

    def read() -> None:
        for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, stream=True):
            said.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="failed on purpose"):
        read()
    assert "".join(said) == " ".join(SCRIPT.split(" ")[:2])


def test_leaving_a_stream_cancels_the_request(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.token_s = 0.05
    with client.completions.create(model=MODEL, prompt="x", max_tokens=64, stream=True) as chunks:
        next(iter(chunks))
    _wait_until(lambda: loop.cancelled == [loop.seen[0].id])
    assert not loop.finished


def test_leaving_without_a_stream_cancels_the_request(client: openai.OpenAI, loop: FakeLoop) -> None:
    loop.token_s = 0.5
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model=MODEL, prompt="x", max_tokens=64)
    _wait_until(lambda: loop.cancelled == [loop.seen[0].id])
    assert not loop.finished


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
