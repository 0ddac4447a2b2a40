"""Workers, their order, and what is left when one of them fails: with servers as contenders, which need no model."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
from rich.console import Console

from ops import bench_settings
from ops.bench_line_up import Contender, line_up
from ops.bench_measure import Measure
from ops.bench_picture import draw
from ops.bench_report import report, show
from ops.bench_run import BENCH_WORKER, BenchRun
from ops.bench_server import Server
from ops.bench_settings import BenchSettings
from ops.task_process import Worker
from shared.config import Config
from shared.errors import ConfigError, RedraftError
from tests.ops.bench_fakes import ASK, canned_server, job


def settings(*words: str) -> BenchSettings:
    parser = ArgumentParser()
    bench_settings.add_arguments(parser)
    return bench_settings.read_arguments(parser.parse_args(words))


def test_a_server_is_timed_by_what_it_counts() -> None:
    with canned_server(tokens=5) as server:
        contender = Server(Contender("x", "server", url=f"{server.url}/v1/"), Config(), job(ignore_eos=True))
        measure = contender.run([ASK, ASK], "chat", 7)
    assert contender.facts["model"] == "canned"
    assert contender.facts["version"] == "1.2"
    assert measure.tokens == 10
    assert len(measure.times.ttft_s) == len(measure.times.latency_s) == 2
    assert all(0 < first <= last for first, last in zip(measure.times.ttft_s, measure.times.latency_s, strict=True))
    assert server.bodies[0] == {
        "model": "canned",
        "messages": ASK,
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert Measure.from_dict(json.loads(json.dumps(measure.to_dict()))).tokens == 10


def test_a_server_that_refuses_says_so() -> None:
    with canned_server(status=422) as server:
        contender = Server(Contender("x", "server", url=server.url), Config(), job())
        with pytest.raises(RedraftError, match="answered 422"):
            contender.run([ASK], "chat", 7)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--against: http://127\.0\.0\.1:1/v1/models"):
        Server(Contender("x", "server", url="http://127.0.0.1:1"), Config(), job())


def test_a_worker_that_cannot_load_says_why_and_one_that_is_dead_too(tmp_path: Path) -> None:
    bad = Contender("x", "server", url="http://127.0.0.1:1").to_dict()
    with Worker(BENCH_WORKER, "x", tmp_path / "x.log", threads=1, own=False) as worker:
        with pytest.raises(RedraftError, match="x: --against"):
            worker.ask("load", contender=bad, config=Config().to_dict(), **job())
        assert worker.ask("memory")["peak"] > 2**20  # it still answers
        worker.kill()
        with pytest.raises(RedraftError, match="x ended with exit code -9"):
            worker.ask("memory")


def test_contenders_take_turns_and_one_that_fails_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BenchRun, "_read_bandwidth", lambda self: setattr(self.findings, "bandwidth", 1e9))
    with canned_server() as good, canned_server() as bad:
        chosen = settings(
            *("--contenders", "plain", "--domains", "chat,code", "--count", "2", "--batch", "1,2", "--repeats", "2"),
            *("--against", f"good={good.url}", "--against", f"bad={bad.url}", "--threads", "1"),
        )
        servers = [contender for contender in line_up(chosen) if contender.kind == "server"]
        said: list[str] = []
        run = BenchRun(chosen, servers, tmp_path, said.append)
        # Two domains, two groups at batch 1 and one at batch 2, for two contenders, twice.
        assert run.calls == 2 * 2 * 3 * 2
        turns: list[str] = []

        def advance(text: str) -> None:
            turns.append(text.rpartition(" · ")[2])
            if len(turns) == 13:  # in the second repeat
                bad.status = 500

        run(advance)
    assert turns[:4] == ["good", "bad", "bad", "good"]
    findings = run.findings
    assert findings.complete
    assert "answered 500" in findings.failed["bad"]
    assert sum(result.contender == "good" for result in findings.results) == 12
    found = report(findings, chosen)
    json.dumps(found)
    assert {row["domain"] for row in found["rows"]} == {"chat", "code", "all"}
    [row] = [r for r in found["rows"] if (r["contender"], r["batch"], r["domain"]) == ("good", 2, "all")]
    assert row["calls"] == 4
    assert row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert row["alpha"] is None
    draw(tmp_path / "bench.png", found)
    show(found, Console())
    assert "bad left the run" in capsys.readouterr().out
