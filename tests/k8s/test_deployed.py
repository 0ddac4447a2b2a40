"""`serve.yaml` as KubeRay would send it, deployed on a real Ray Serve with a tiny target in place of the large one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from learner.app import ACTOR, NAMESPACE
from shared.keys import changed_keys
from tests.k8s.kustomize import overlay
from tests.k8s.pods import ray_service
from tests.learner.traffic import TinyServing

pytestmark = pytest.mark.slow  # replicas and learners start, and start again
WITHIN_S = 240.0  # each replica imports torch, on a machine that is busy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyServing:
    return TinyServing(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def serve(ray_cluster: None) -> Iterator[Any]:
    from ray import serve

    yield serve
    serve.shutdown()


def config_of(name: str, tiny: TinyServing, folder: Path, redis_url: str, port: int) -> dict[str, Any]:
    """The overlay's, with what this machine lacks replaced: GPUs, nodes, models, the servers' addresses."""
    plain: dict[str, Any] = yaml.safe_load(ray_service(overlay(name))["spec"]["serveConfigV2"])
    plain["http_options"] = {"host": "127.0.0.1", "port": port}
    own = {
        "home": str(folder),
        "redis.url": redis_url,
        "redis.prefix": f"test-{uuid4().hex}",
        "mlflow.tracking_uri": (folder / "mlruns").as_uri(),
        "serve.port": port,
        "serve.keys_file": str(folder / "keys.json"),
        "serve.replica_cpus": 0.1,
        "serve.replica_gpus": 0,
        "serve.replica_resource": "",
        "learner.cpus": 0.1,
        "learner.gpus": 0,
        "learner.resource": "",
        "learner.device": "cpu",
        "target.model": str(tiny.config.target.model),
        "target.device": "cpu",
        "target.dtype": "fp32",
        "drafter.kind": "auto",
        "drafter.model": str(tiny.config.drafter.model),
        "engine.kv_tokens": 2048,
        "engine.threads": 1,
    }
    for application in plain["applications"]:
        application["args"] = application["args"] | own
    return plain


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def learner_settings() -> dict[str, Any] | None:
    import ray

    try:
        return dict(ray.get(ray.get_actor(ACTOR, namespace=NAMESPACE).settings.remote(), timeout=20))
    except (ValueError, ray.exceptions.RayError):
        return None


@pytest.mark.parametrize("name", ["kind-cpu", "production"])
def test_what_an_overlay_serves_is_served(
    name: str, serve: Any, tiny: TinyServing, tmp_path: Path, redis_url: str
) -> None:
    import ray

    with changed_keys(tmp_path / "keys.json") as held:
        held[0], secret = held[0].with_new("client", ["inference"], "tenant")
    port = free_port()
    plain = config_of(name, tiny, tmp_path, redis_url, port)
    serve.start(http_options=plain["http_options"])
    client = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(plain))

    def running() -> bool:
        states = {app: status.status for app, status in serve.status().applications.items()}
        assert "DEPLOY_FAILED" not in states.values(), serve.status()
        return states == {"redraft": "RUNNING", "learner": "RUNNING"}

    until(running, "running")
    url, key = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {secret}"}
    until(lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 200, "ready")
    assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
    models = httpx.get(f"{url}/v1/models", headers=key, timeout=60).json()["data"]
    body = {"model": models[0]["id"], "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text

    replicas = serve.status().applications["redraft"].deployments["Replica"].replica_states
    scaling = plain["applications"][0]["deployments"][0].get("autoscaling_config", {"min_replicas": 1})
    assert replicas == {"RUNNING": scaling["min_replicas"]}

    until(lambda: learner_settings() is not None, "a learner")
    for application in plain["applications"]:
        application["args"]["learner.learning_rate"] = 0.001
    client.deploy_apps(ServeDeploySchema.model_validate(plain))
    until(lambda: (learner_settings() or {}).get("learner", {}).get("learning_rate") == 0.001, "the new settings")
    ray.kill(ray.get_actor(ACTOR, namespace=NAMESPACE), no_restart=True)
