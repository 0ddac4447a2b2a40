"""The replica as a Ray Serve deployment: options, start-up, health, and how it leaves.

Owns nothing that decodes: `serving.replica` builds the engine, `serving.api` answers HTTP. A single replica loads in
the background, so that its probes answer meanwhile; one of several loads before it joins, because requests would flow
to a replica that refuses them quickly. Requests are refused in the replica: Serve's own limits lie beyond the
replica's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import ray
from fastapi import FastAPI
from ray import serve

from serving.api.domains import Domains
from serving.api.enveloped import PROXY_CALLBACK
from serving.api.router import create_app
from serving.api.service import Backend, Service
from serving.features import RayFeatureSink
from serving.metrics import RayExport
from serving.overview import Overview, Own
from serving.scaling import KV_USAGE, kv_usage
from shared.config import Config, config_from_dict, load_config
from shared.errors import ConfigError, RedraftError, ServiceDown
from shared.keys import WatchedKeys, access_of
from shared.metrics import Sample, serving_samples
from shared.openmp import openmp_environment
from shared.store import Store

if TYPE_CHECKING:
    from serving.replica import Replica

APPLICATION, DEPLOYMENT = "redraft", "Replica"
BESIDE_GENERATION = 32  # probes and model lists that a full replica still answers
RETRY_AFTER_S = 1
CONSTRUCTIONS = 3  # attempts of a replica that loads before it joins
READY_S = 1800.0  # a large target on a slow disk

Load = Callable[[Config, str, RayFeatureSink | None], Any]  # a Replica, or what a test takes for one

log = logging.getLogger(__name__)


def load_replica(config: Config, replica_id: str, features: RayFeatureSink | None) -> Replica:
    """A decoding replica."""
    from serving.replica import Replica  # and with it torch, which only replicas need

    replica = Replica(config, replica_id, features)
    replica.start()
    return replica


def threads_of(config: Config) -> int:
    """Torch threads of a replica; 0 in the config is every core, shared with whatever else runs there."""
    return config.engine.threads or os.cpu_count() or 1


class EngineReplica:
    """One Serve replica. `load` makes what decodes."""

    def __init__(self, config: Mapping[str, Any], load: Load = load_replica) -> None:
        self._service = Service(serve.get_replica_context().replica_tag)
        self._replica: Any = None
        self._features: RayFeatureSink | None = None
        self._export = RayExport(self._samples)
        self._error: Exception | None = None
        self._config, self._load_replica = config_from_dict(config), load
        try:
            self._keys = WatchedKeys(self._config.keys_path) if access_of(self._config) == "keys" else None
        except ConfigError as error:  # never open by mistake
            raise RuntimeError(str(error)) from None  # our own errors do not survive Ray's pickling
        if self._keys is None:
            log.warning("API keys are off: whoever reaches %s may ask", self._config.serve.host)
        if self._config.serve.replicas == 1:
            threading.Thread(target=self._load, name="loading", daemon=True).start()
            return
        self._load()
        if self._error is not None:
            raise RuntimeError(str(self._error))

    def __serve_build_asgi_app__(self) -> FastAPI:
        redis = self._config.redis
        store = Store(redis.url, redis.prefix) if redis.url else None
        return create_app(self._service, self._keys, Overview(self._service.replica_id, store, self._own))

    async def check_health(self) -> None:
        """Raises for what a new process can mend; a wrong setting stays visible in /readyz instead."""
        if self._error is not None and not isinstance(self._error, RedraftError):
            raise RuntimeError(f"the replica could not load: {self._error}")
        if self._replica is not None and not self._replica.loop.alive:
            self._service.fail("its decoding thread has ended")
            raise RuntimeError("the decoding thread has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `serving.scaling` decides by, beside Serve's own count of requests."""
        if self._replica is None:
            return {KV_USAGE: 0.0}
        return {KV_USAGE: kv_usage(self._replica.loop.snapshot())}

    async def __del__(self) -> None:
        self._service.drain()
        await asyncio.to_thread(self._export.ticker.stop)
        if self._replica is not None:
            await asyncio.to_thread(self._replica.stop)
        if self._features is not None:
            await asyncio.to_thread(self._features.stop)

    def _own(self) -> Own | None:
        return None if self._replica is None else Own(self._replica.counters(), self._replica.status())

    def _samples(self) -> Iterator[Sample]:
        own = self._own()
        return serving_samples(own.counters, own.status) if own else iter(())

    def _load(self) -> None:
        config = self._config
        try:
            if config.trace.enabled and config.learner.enabled and config.trace.feature_share > 0:
                self._features = RayFeatureSink(config.trace.feature_tokens)
            replica = self._load_replica(config, self._service.replica_id, self._features)
            loaded = replica.loaded
            self._service.open(
                Backend(
                    decoder=replica.loop,
                    tokenizer=loaded.tokenizer,
                    name=config.target.served_name or loaded.name,
                    fingerprint=loaded.fingerprint,
                    context=replica.context,
                    token_count=loaded.token_count,
                    most_prompts=config.engine.max_queue,
                    numerics=replica.numerics,
                    domains=Domains(config.serve.max_domains),
                )
            )
            self._replica = replica
            self._export.ticker.start()
        except Exception as error:
            log.exception("the replica could not load")
            self._service.fail(str(error))
            self._error = error


def _shares_cores(config: Config) -> bool:
    """Whether a learner may compute on the replica's cores."""
    return config.learner.enabled and config.learner.device == "cpu"


def ongoing_limit(config: Config) -> int:
    """Requests that Serve lets into one replica: more than it accepts, so that it refuses by itself."""
    return config.engine.max_batch + config.engine.max_queue + BESIDE_GENERATION


def application(config: Config, load: Load = load_replica) -> serve.Application:
    """The Serve application for this configuration."""
    ongoing = ongoing_limit(config)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.serve.replicas,
        max_ongoing_requests=ongoing,
        # Serve counts a request as queued from its arrival until a replica has it, so a burst that the replicas could
        # take must fit. The bound is for the time when none is there.
        max_queued_requests=ongoing * config.serve.replicas,
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        graceful_shutdown_timeout_s=config.serve.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        max_constructor_retry_count=CONSTRUCTIONS,
        ray_actor_options={
            "num_cpus": config.serve.replica_cpus,
            "num_gpus": config.serve.replica_gpus,
            "resources": {config.serve.replica_resource: 1} if config.serve.replica_resource else {},
            # Ray would set OMP_NUM_THREADS to the reservation.
            "runtime_env": {"env_vars": openmp_environment(threads_of(config), alone=not _shares_cores(config))},
        },
    )
    return deployment(serve.ingress()(EngineReplica)).bind(config.to_dict(), load)


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Entry point of Serve config files: `import_path: serving.app:build`, `args` being dotted config keys.

    Such a file says itself where Serve listens, so keys are always asked for. Raises ConfigError.
    """
    config = load_config(overrides=dict(arguments))
    if config.serve.auth == "off":
        problem = "a Serve config file may listen anywhere, and off would let anybody in"
        raise ConfigError("serve.auth", problem, "Leave it out and name serve.keys_file.")
    return application(_with_auth(config, "keys"))


def deploy(config: Config, *, wait: bool = True, timeout_s: float = READY_S, load: Load = load_replica) -> None:
    """Start Serve and the application on the Ray that this process is connected to.

    With `wait`, returns when requests are served. Raises ConfigError for a port in use, RedraftError when a replica
    cannot load, ServiceDown when it takes too long.
    """
    if not ray.is_initialized():
        raise ConfigError("ray", "this process is connected to no cluster", "Call ray.init first")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Decided once, so that replicas which start later do as their peers.
    config = _with_auth(config, "keys" if access_of(config) == "keys" else "off")
    _require_port(config)
    serve.start(
        http_options={"host": config.serve.host, "port": config.serve.port},
        controller_options={"runtime_env": {"env_vars": {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK}}},
    )
    try:
        serve.run_many(
            [serve.RunTarget(target=application(config, load), name=APPLICATION, route_prefix="/")],
            wait_for_applications_running=wait,
        )
    except RuntimeError as error:  # Serve's word for a deployment that failed
        raise RedraftError(str(error)) from error
    if wait:
        _wait_until_ready(config, timeout_s)


def shutdown() -> None:
    """Drain and remove the application and Serve; the cluster stays."""
    serve.shutdown()  # type: ignore[no-untyped-call]


def _with_auth(config: Config, auth: Literal["keys", "off"]) -> Config:
    return replace(config, serve=replace(config.serve, auth=auth))


def _require_port(config: Config) -> None:
    """Ray shares ports, so a second stack on the same one would take half of the first one's requests."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:  # no Serve here yet: the port must be free
        family = socket.AF_INET6 if ":" in config.serve.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((config.serve.host, config.serve.port))
            except OSError as error:
                raise ConfigError(
                    "serve.port", f"{config.serve.port} cannot be used ({error.strerror})", "Choose a free port"
                ) from error


def _wait_until_ready(config: Config, timeout_s: float) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.serve.host, config.serve.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{config.serve.port}/readyz"
    deadline, last = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except urllib.error.HTTPError as answer:
            last = answer.read().decode("utf-8", "replace")
            if answer.code == 503 and (message := _failure(last)):
                raise RedraftError(f"the replica could not load: {message}") from None
        except OSError as error:
            last = str(error)
        time.sleep(0.2)
    raise ServiceDown(f"no replica was ready within {timeout_s:.0f} s; the last answer was: {last}")


def _failure(body: str) -> str:
    try:
        report = json.loads(body)
    except ValueError:
        return ""
    return str(report.get("message", "")) if report.get("status") == "failed" else ""
