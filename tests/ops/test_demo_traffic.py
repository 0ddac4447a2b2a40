"""Users send every prompt of the feed once, as streamed chat requests; refusals are waited out, failures counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from ops.demo_chat import Asking, served_model
from ops.demo_plan import Feed, Phase, Plan, Prompt
from ops.demo_traffic import Traffic, finish_times
from shared.errors import ServiceDown
from tests.ops.demo_fakes import FakeApi

ASKING = Asking("m", max_tokens=7, temperature=0.5)


def _traffic(transport: httpx.AsyncBaseTransport, prompts: int, users: int = 3, seconds: float = 60) -> Traffic:
    texts = tuple(Prompt("sql", ({"role": "user", "content": f"p{n}"},)) for n in range(prompts))
    return Traffic("http://fake", Feed(Plan((Phase("sql", 1.0, texts),), ()), seconds), ASKING, users, transport)


def _wait(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def test_each_prompt_goes_out_once_and_its_answer_is_read() -> None:
    api = FakeApi(pieces=4)
    traffic = _traffic(api.transport, prompts=10)
    traffic.start()
    _wait(lambda: traffic.over)
    assert sorted(body["messages"][0]["content"] for body in api.bodies) == [f"p{n}" for n in range(10)]
    assert {answer.tokens for answer in traffic.answers} == {4}
    assert all(a.sent_at <= a.first_at <= a.finished_at and not a.error for a in traffic.answers)
    assert len(finish_times(traffic.answers)["sql"]) == 10
    assert traffic.first_sent("sql") is not None
    assert traffic.first_sent("german") is None
    body = api.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 7, 0.5, True)
    assert body["metadata"] == {"domain": "sql"}


def test_a_full_server_is_asked_again_with_the_same_prompt() -> None:
    full = httpx.Response(429, headers={"retry-after": "0"})
    api = FakeApi(refusals=[full, full])
    traffic = _traffic(api.transport, prompts=1)
    traffic.start()
    _wait(lambda: traffic.over)
    assert [answer.error for answer in traffic.answers] == [""]
    assert len(api.bodies) == 3


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "HTTP 400: too long"),
        (httpx.Response(200, text='data: {"error": {"message": "died"}}\n\n'), "died"),
        (httpx.Response(200, text='data: {"choices": []}\n\n'), "without [DONE]"),
    ],
)
def test_a_failed_request_is_counted_with_its_reason(refusal: httpx.Response, said: str) -> None:
    traffic = _traffic(FakeApi(refusals=[refusal]).transport, prompts=1)
    traffic.start()
    _wait(lambda: traffic.over)
    (answer,) = traffic.answers
    assert said in answer.error
    assert finish_times(traffic.answers) == {}


def test_stopping_hangs_up_at_once() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    traffic = _traffic(httpx.MockTransport(never), prompts=1000)
    traffic.start()
    _wait(lambda: bool(traffic.answers))
    traffic.stop()
    assert traffic.over
    assert traffic.answers[0].error == "refused"


def test_a_defect_in_a_user_is_not_swallowed() -> None:
    async def broken(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError

    traffic = _traffic(httpx.MockTransport(broken), prompts=1, users=1)
    traffic.start()
    with pytest.raises(ExceptionGroup):
        _wait(lambda: traffic.over)


def test_the_served_model_is_asked_for() -> None:
    def get(answer: httpx.Response) -> Callable[..., httpx.Response]:
        answer.request = httpx.Request("GET", "http://fake")
        return lambda *_, **__: answer

    assert served_model("http://fake", get(httpx.Response(200, json={"data": [{"id": "m"}]}))) == "m"
    with pytest.raises(ServiceDown, match="gave no model"):
        served_model("http://fake", get(httpx.Response(503)))
