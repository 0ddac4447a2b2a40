"""`redraft loadgen`: what is sent when, what a user is said to have seen, and what the figures make of it."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import httpx
import pytest

from ops import cli
from ops.loadgen_beside import beside
from ops.loadgen_figures import Goal, figures, read_goal
from ops.loadgen_request import Form, Prompt, Sample, send
from ops.loadgen_traffic import Plan, arrivals, in_order, run
from ops.percentiles import percentile, summary
from shared.errors import ConfigError
from tests.ops.slow_server import PIECES, SPECULATIVE, SlowServer

PROMPTS = [Prompt("sql", [{"role": "user", "content": f"p{n}"}]) for n in range(5)]
CHAT = Form(chat=True, model="m", max_tokens=9, temperature=0.5)


def client(server: SlowServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=10, trust_env=False)


def ask(server: SlowServer, form: Form = CHAT) -> Sample:
    async def one() -> Sample:
        async with client(server) as http:
            return await send(http, form, PROMPTS[0], 0, 0.0)

    return asyncio.run(one())


def drive(server: SlowServer, plan: Plan) -> list[Sample]:
    async def all_of_them() -> list[Sample]:
        async with client(server) as http:
            return await run(http, CHAT, PROMPTS, plan)

    return asyncio.run(all_of_them())


# One request


@pytest.mark.parametrize("chat", [True, False])
def test_a_request_is_what_the_api_knows_and_its_answer_is_timed_by_text(chat: bool) -> None:
    with SlowServer() as server:
        sample = ask(server, Form(chat=chat, model="m", max_tokens=9, temperature=0.5, extra=(("ignore_eos", True),)))
    [(path, body)] = server.requests
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert body.pop("messages", None) == ([{"role": "user", "content": "p0"}] if chat else None)
    assert body.pop("prompt", None) == (None if chat else "p0")
    assert body == {
        "model": "m", "max_tokens": 9, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True},
        "metadata": {"domain": "sql"}, "ignore_eos": True,
    }  # fmt: skip
    assert sample.error == ""
    # Nothing is seen before it was written, and the empty chunk that opens a stream is no first token.
    assert sample.first_at >= server.written[0]
    assert sample.last_at >= server.written[-1]
    assert (sample.tokens, sample.chunks, len(sample.gaps), sample.counted) == (PIECES + 2, PIECES, PIECES - 1, True)
    assert sample.itl == pytest.approx((sample.last_at - sample.first_at) / (PIECES + 1))
    assert sum(sample.gaps) == pytest.approx(sample.last_at - sample.first_at)
    assert (sample.accepted, sample.tested, sample.version) == (3, 5, "v7")


def test_chunks_are_counted_where_the_server_counts_nothing() -> None:
    with SlowServer(usage=False) as server:
        sample = ask(server)
    assert (sample.tokens, sample.counted, sample.tested) == (PIECES, False, 0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuse", "HTTP 429: no room"),
        ("break", "the answer ended without"),
        ("error", "it broke"),
        ("mute", "no text"),
    ],
)
def test_what_fails_is_a_sample_with_the_reason(how: str, said: str) -> None:
    with SlowServer(fault=how) as server:
        sample = ask(server)
    assert said in sample.error


def test_nobody_there_is_a_sample_too() -> None:
    server = SlowServer()
    with server:
        pass
    assert ask(server).error


# When


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = arrivals(Plan(requests=4000, rate=5.0, seed=1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # Exponential gaps have mean = deviation = 1/rate; 4,000 of them know both to 1/sqrt(4000) = 1.6 %.
    assert mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.08)
    assert times == arrivals(Plan(requests=4000, rate=5.0, seed=1)) != arrivals(Plan(requests=4000, rate=5.0, seed=2))
    assert all(at <= 10 for at in arrivals(Plan(requests=4000, rate=5.0, duration=10)))


def test_prompts_come_in_the_order_of_the_seed_and_again() -> None:
    order = in_order(PROMPTS, seed=3)
    first = [next(order).text for _ in range(5)]
    assert sorted(first) == [prompt.text for prompt in PROMPTS]
    assert [next(order).text for _ in range(5)] == first


def test_an_open_loop_waits_for_nobody_and_a_closed_loop_for_its_answers() -> None:
    with SlowServer(hold=True) as server:  # holds every answer until six requests are there
        samples = drive(server, Plan(requests=6, rate=200.0))
        assert [sample.error for sample in samples] == [""] * 6
        assert server.most_at_once == 6
    with SlowServer() as server:
        samples = drive(server, Plan(requests=12, concurrency=3))
        assert [sample.number for sample in samples] == list(range(12))
        assert server.most_at_once <= 3


# Figures


def sample(number: int, *, ttft: float = 1.0, itl: float = 0.1, tokens: int = 11, **more: Any) -> Sample:
    sent = 100.0 + number
    last = sent + ttft + itl * (tokens - 1)
    fields = {"first_at": sent + ttft, "last_at": last, "ended_at": last, "tokens": tokens, "counted": True} | more
    return Sample(number, "sql", sent, sent, **fields)


def test_figures_leave_the_warm_up_out_and_divide_by_the_measured_span() -> None:
    samples = [sample(0, ttft=50.0), *(sample(n) for n in range(1, 5)), sample(5, error="HTTP 500: oh")]
    found = figures(samples, warm_up=1, goal=Goal())
    # From the sending of request 1 at 101 to the last token of request 4 at 104 + 1 + 10 · 0.1 = 106.
    assert found["seconds"] == pytest.approx(5.0)
    assert found["rates"]["output_tokens"] == pytest.approx(4 * 11 / 5)
    assert found["rates"]["requests"] == pytest.approx(4 / 5)
    assert found["ttft"]["max"] == pytest.approx(1.0)
    assert found["itl"]["mean"] == pytest.approx(0.1)
    assert found["requests"] == {
        "sent": 6, "warm_up": 1, "measured": 5, "failed": 1, "errors": {"HTTP 500: oh": 1},
    }  # fmt: skip


def test_goodput_counts_what_meets_every_goal() -> None:
    samples = [sample(0), sample(1, ttft=3.0), sample(2, itl=0.5), sample(3, error="gone"), sample(4, tokens=1)]
    found = figures(samples, warm_up=0, goal=read_goal("ttft=2,itl=0.2"))
    assert found["goal"] == {"ttft": 2.0, "itl": 0.2, "e2e": None, "met": 2, "of": 5}
    assert figures(samples, warm_up=0, goal=read_goal("e2e=1.5"))["goal"]["met"] == 1  # one token after one second


def test_alpha_is_accepted_over_tested_and_its_counts_are_kept() -> None:
    samples = [sample(0, accepted=3, tested=4, version="v1"), sample(1, accepted=0, tested=4, version="v2"), sample(2)]
    drafts = figures(samples, warm_up=0, goal=Goal())["drafts"]
    assert (drafts["accepted"], drafts["tested"], drafts["requests"], drafts["versions"]) == (3, 8, 2, ["v1", "v2"])
    assert drafts["alpha_by_request"]["mean"] == pytest.approx(0.375)


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted([3.0, 1.0, 4.0, 1.5, 9.0, 2.6])
    for share in (0, 0.5, 0.9, 0.99, 1):
        assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, share * 100)))
    assert summary([]) == {"count": 0}


@pytest.mark.parametrize("text", ["ttft", "ttft=-1", "speed=3", "ttft=fast"])
def test_a_goal_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        read_goal(text)


# The command


def test_the_command_asks_for_the_model_shows_its_key_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_API_KEY", "secret")
    file = tmp_path / "load.json"
    with SlowServer(key="secret") as server:
        words = ["loadgen", "--url", f"{server.url}/v1", "--requests", "6", "--warmup", "2", "--concurrency", "2"]
        assert cli.run([*words, "--slo", "ttft=30", "--domains", "sql", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    for word in ("TTFT", "ITL", "listed-model", "output tokens/s", "4 of 4 met the goal", "α 0.600"):
        assert word in said
    report = json.loads(file.read_text())
    assert report["drafts"]["accepted"] == 4 * SPECULATIVE["num_accepted_draft_tokens"]
    assert [row["number"] for row in report["samples"]] == list(range(6))
    assert "secret" not in file.read_text()


def test_a_server_that_refuses_everything_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with SlowServer(fault="refuse") as server:
        assert cli.run(["loadgen", "--url", server.url, "--requests", "2"]) == 1
    assert "2 × HTTP 429: no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "localhost:8000"], "--url: 'localhost:8000' is no URL"),
        (["--rate", "0"], "--rate: 0.0 is not positive"),
        (["--warmup", "100"], "--warmup: 100 of 100 requests"),
        (["--extra", "[1]"], "--extra: is not a JSON object"),
        (["--domains", "poetry"], "no prompt set is called 'poetry'"),
    ],
)
def test_a_mistake_names_its_flag(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["loadgen", *words]) == cli.REFUSED
    assert said in capsys.readouterr().err


def test_agreement_with_another_generator_is_a_number_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SlowServer() as server:
        words = ["loadgen", "--url", server.url, "--requests", "3", "--json", str(tmp_path / "ours.json")]
        assert cli.run(words) == 0
        ours = json.loads((tmp_path / "ours.json").read_text())
        theirs = tmp_path / "theirs.json"
        # A generator that sees ITL as we do, and times to the first token that no server could have now.
        theirs.write_text(
            json.dumps(
                {
                    "time_to_first_token": {"avg": 1e9, "p50": 1e9},
                    "inter_token_latency": {"avg": ours["itl"]["mean"] * 1e3, "p50": ours["itl"]["p50"] * 1e3},
                    "output_token_throughput": {"avg": ours["rates"]["output_tokens"]},
                }
            )
        )
        assert [row.agrees for row in beside(ours, theirs)] == [False, False, True, True, True]
        capsys.readouterr()
        assert cli.run([*words[:5], "--beside", str(theirs)]) == 1
        assert "differs" in capsys.readouterr().out
        theirs.write_text("{}")
        assert cli.run([*words[:5], "--beside", str(theirs)]) == cli.REFUSED
