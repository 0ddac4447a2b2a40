"""The deployment on a real Ray Serve, with a scripted engine: what only the way through Serve's proxy can show."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving.app import build, deploy, ongoing_limit, shutdown
from shared.config import Config, config_from_flat
from shared.errors import ConfigError, RedraftError
from shared.metrics import SERVING_METRICS
from tests.fakes import TOKEN_S, load_fake_replica
from tests.ray_export import wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

MODEL = "tiny"
MAX_BATCH, MAX_QUEUE = 1, 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def config_for(port: int, home: Path = Path(), model: str = "fake") -> Config:
    return config_from_flat(
        {
            "home": str(home),
            "target.model": model,
            "serve.port": port,
            "serve.replica_cpus": 0.1,
            "serve.drain_s": 5,
            "engine.max_batch": MAX_BATCH,
            "engine.max_queue": MAX_QUEUE,
            "engine.threads": 3,
        }
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def address(ray_cluster: None, home: Path) -> Iterator[str]:
    """A service that has begun to load; it goes on once there is a file `go` in its home."""
    port = free_port()
    deploy(config_for(port, home, "gated"), wait=False, load=load_fake_replica)
    yield f"http://127.0.0.1:{port}"
    shutdown()


@pytest.fixture
def ready(address: str, home: Path) -> str:
    (home / "go").touch()
    wait_until(lambda: httpx.get(f"{address}/readyz", timeout=60).status_code == 200, "ready")
    return address


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.1)


def generation(domain: str = "default", stream: bool = False) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", "max_tokens": 16, "stream": stream, "metadata": {"domain": domain}}


def test_probes_answer_while_the_replica_loads(address: str) -> None:
    assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
    answer = httpx.get(f"{address}/readyz", timeout=60)
    assert (answer.status_code, answer.json()["status"]) == (503, "loading")
    refused = httpx.post(f"{address}/v1/completions", json=generation(), timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"]


def test_the_client_talks_through_the_proxy(ready: str) -> None:
    with openai.OpenAI(base_url=f"{ready}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model=MODEL, prompt="x")
        assert answer.choices[0].text == "3 threads, PASSIVE waiting"  # what the replica found in its environment
        started, arrivals = time.monotonic(), []
        messages = [{"role": "user", "content": "x"}]
        for _ in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
            arrivals.append(time.monotonic() - started)
        assert arrivals[-1] - arrivals[0] > 1.5 * TOKEN_S  # chunks come as they are made, not all at the end


def test_every_metric_of_a_replica_reaches_prometheus_through_ray(ready: str) -> None:
    replica = httpx.get(f"{ready}/readyz", timeout=60).json()["replica"]
    found = wait_for({metric.name.removesuffix("_total") for metric in SERVING_METRICS}, replica=replica)
    assert {metric.name: found[metric.name.removesuffix("_total")].type for metric in SERVING_METRICS} == {
        metric.name: metric.kind for metric in SERVING_METRICS
    }

    samples = [sample for family in found.values() for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        labels |= {"replica": replica}  # earlier ones' counters stand still, and stay
        return sum(s.value for s in samples if s.name == f"ray_{name}" and labels.items() <= s.labels.items())

    assert value("redraft_spec_decode_num_accepted_tokens_total", domain="sql") == 15.0
    assert value("redraft_spec_decode_num_accepted_tokens_per_pos_total", position="0") == 7.0
    assert value("redraft_gamma_count") == 10.0
    assert value("redraft_gamma_bucket", le="3.0") == 6.0  # 2 of gamma 0 and 4 of gamma 3
    assert value("redraft_drafter_info", version="v7") == 1.0
    assert 'redraft_drafter_info{replica="' in httpx.get(f"{ready}/metrics", timeout=60).text


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_cancels_in_the_replica(ready: str, stream: bool) -> None:
    async def come_and_go() -> None:
        async with httpx.AsyncClient(base_url=ready, timeout=60) as client:

            async def until_running(count: int) -> None:
                while (await client.get("/readyz")).json()["running"] != count:
                    await asyncio.sleep(0.05)

            body = generation("stay", stream) | {"prompt": ["a", "b"]}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.wait_for(until_running(2), 60)
            request.cancel()
            await asyncio.wait_for(until_running(0), 60)  # it would have stayed for ten minutes

    asyncio.run(come_and_go())


def test_a_full_replica_refuses_by_itself_and_still_answers_probes(ready: str) -> None:
    answers = asyncio.run(flood(ready, MAX_BATCH + MAX_QUEUE + 4))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == MAX_BATCH + MAX_QUEUE
    assert statuses.count(429) == 4
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["message"].startswith("The queue is full")


def test_refusals_of_serve_itself_wear_the_envelope(ready: str) -> None:
    async def refused() -> httpx.Response:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=ready, timeout=120, limits=limits) as client:
            waiting: set[asyncio.Task[httpx.Response]] = set()
            done: set[asyncio.Task[httpx.Response]] = set()
            while not done:  # the replica's places first, then the proxy's
                body = generation("stay")
                waiting.add(asyncio.create_task(client.post("/v1/completions", json=body)))
                done, waiting = await asyncio.wait(waiting, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                assert len(waiting) < 6 * ongoing_limit(config_for(0)), "Serve takes requests without a bound"
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return done.pop().result()

    answer = asyncio.run(refused())
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "backpressure" in error["message"]  # Serve's own words, not the replica's
    assert int(answer.headers["retry-after"]) >= 1


def test_a_lost_replica_is_an_envelope_and_comes_back(ready: str) -> None:
    answer = httpx.post(f"{ready}/v1/completions", json=generation("exit"), timeout=60)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    wait_until(lambda: httpx.get(f"{ready}/readyz", timeout=60).status_code == 200, "back")
    assert httpx.post(f"{ready}/v1/completions", json=generation(), timeout=60).status_code == 200


def test_a_replica_that_cannot_load_is_named(ready: str) -> None:
    port = int(ready.rpartition(":")[2])
    with pytest.raises(RedraftError, match=r"target\.model: there is no such model"):
        deploy(config_for(port, model="wrong"), load=load_fake_replica)
    answer = httpx.get(f"{ready}/readyz", timeout=60)
    assert (answer.status_code, answer.json()["status"]) == (503, "failed")


def test_a_serve_config_file_may_name_settings() -> None:
    assert build({"serve.replicas": "2"})._bound_deployment.num_replicas == 2
    with pytest.raises(ConfigError, match=r"serve\.replica:"):
        build({"serve.replica": "2"})


def test_a_serve_config_file_always_asks_for_keys() -> None:
    """It says itself where Serve listens, so our own `serve.host` tells nothing."""
    bound = build({})._bound_deployment
    assert bound.init_args[0]["serve"]["auth"] == "keys"
    with pytest.raises(ConfigError, match=r"serve\.auth"):
        build({"serve.auth": "off"})


def test_the_world_is_not_served_without_keys(home: Path) -> None:
    with pytest.raises(ConfigError, match="redraft keys add"):
        deploy(config_from_flat({"home": str(home), "serve.host": "0.0.0.0"}), load=load_fake_replica)


def test_a_port_in_use_is_named(address: str) -> None:
    shutdown()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"serve\.port"):
        deploy(config_for(taken.getsockname()[1]), load=load_fake_replica)


async def flood(address: str, count: int, domain: str = "default") -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=generation(domain)) for _ in range(count)))
