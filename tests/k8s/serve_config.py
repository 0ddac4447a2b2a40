"""What `serveConfigV2` says: by Ray's schema, by our own configuration, and against the nodes that it will run on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from serving.api.enveloped import PROXY_CALLBACK
from serving.app import APPLICATION, DEPLOYMENT, ongoing_limit
from shared.config import Config, load_config, values_of_environ
from shared.errors import ConfigError
from tests.k8s.kustomize import Document
from tests.k8s.pods import Pod, of_kind, pods, ray_service
from tests.k8s.references import Secrets, hosts_of, reachable

_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_UNITS = {"mb": 2**20, "gb": 2**30}


def problems(documents: Sequence[Document], secrets: Secrets) -> Iterator[str]:
    del secrets
    text = ray_service(documents)["spec"]["serveConfigV2"]
    try:
        plain = yaml.safe_load(text)
        ServeDeploySchema.model_validate(plain)
    except (yaml.YAMLError, ValidationError, ImportError, AttributeError) as error:  # the last two: the policy's
        yield f"serveConfigV2: {error}"
        return
    yield from _strictly(plain)
    applications = {application["name"]: application for application in plain["applications"]}
    if set(applications) != {APPLICATION, "learner"}:
        yield f"serveConfigV2: the applications are {sorted(applications)}"
        return
    serving, learner = applications[APPLICATION], applications["learner"]
    if serving["args"] != learner["args"]:
        yield "serveConfigV2: replicas and learner have different settings"
    for application in applications.values():
        yield from _importable(application["import_path"])
    yield from _environments(documents)
    try:
        config = load_config(environ=_environment(documents), overrides=serving["args"])
    except ConfigError as error:
        yield f"serveConfigV2, args: {error}"
        return
    yield from _access(config, documents)
    yield from _ports(plain, config, documents)
    for host, port in hosts_of(config.mlflow.tracking_uri + "/"):
        yield from reachable("mlflow.tracking_uri", host, port, documents)
    yield from _memory(config, documents)
    [deployment] = serving["deployments"]
    if deployment["name"] != DEPLOYMENT:
        yield f"serveConfigV2: there is no deployment {deployment['name']}"
    yield from _limits(deployment, config, documents)
    yield from _placement(deployment, config, documents)


def _strictly(plain: Mapping[str, Any]) -> Iterator[str]:
    """Ray takes and ignores what it does not know."""
    yield from _unknown("serveConfigV2", plain, ServeDeploySchema)
    yield from _unknown("http_options", plain["http_options"], HTTPOptionsSchema)
    for application in plain["applications"]:
        yield from _unknown(application["name"], application, ServeApplicationSchema)
        for deployment in application.get("deployments", []):
            yield from _unknown(deployment["name"], deployment, DeploymentSchema)
            yield from _unknown("autoscaling_config", deployment.get("autoscaling_config", {}), AutoscalingConfig)


def _unknown(where: str, given: Mapping[str, Any], model: type[BaseModel]) -> Iterator[str]:
    yield from (f"{where}: Serve has no {name}" for name in given if name not in model.model_fields)


def _importable(path: str) -> Iterator[str]:
    module, _, name = path.partition(":")
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        yield f"serveConfigV2: {path} cannot be imported ({error})"


def _environment(documents: Sequence[Document]) -> dict[str, str]:
    """The settings that come by variables; a Secret's text stands for itself."""
    head = next(pod for pod in pods(documents) if pod.ray == "head")
    found = {variable["name"]: variable.get("value", "secret") for variable in head.environment()}
    return {name: value for name, value in found.items() if name.startswith("REDRAFT_")}


def _environments(documents: Sequence[Document]) -> Iterator[str]:
    """Serve builds the application on any node, and the learner may move: all must see the same."""
    seen = {}
    for pod in pods(documents):
        if not pod.ray:
            continue
        variables = {variable["name"]: variable.get("value") for variable in pod.environment()}
        ours = {name: value for name, value in variables.items() if name.startswith("REDRAFT_")}
        try:
            values_of_environ({name: value or "" for name, value in ours.items()})
        except ConfigError as error:
            yield f"{pod.where}: {error}"
        seen[pod.where] = ours
        if variables.get(_CALLBACK) != PROXY_CALLBACK:
            yield f"{pod.where}: {_CALLBACK} is not {PROXY_CALLBACK}"
    if len({tuple(sorted(ours.items())) for ours in seen.values()}) > 1:
        yield f"the nodes of Ray have different REDRAFT_* variables: {seen}"


def _access(config: Config, documents: Sequence[Document]) -> Iterator[str]:
    if config.serve.auth != "keys":
        yield f"serve.auth is {config.serve.auth}: requests must carry a key"
    for pod in pods(documents):
        if not pod.ray:
            continue
        secret = {volume["name"] for volume in pod.spec["volumes"] if "secret" in volume}
        mounts = [mount for container in pod.spec["containers"] for mount in container["volumeMounts"]]
        folders = [mount for mount in mounts if mount["name"] in secret and "subPath" not in mount]
        if str(PurePosixPath(config.serve.keys_file).parent) not in [mount["mountPath"] for mount in folders]:
            yield f"{pod.where}: {config.serve.keys_file} is in no mounted Secret"
        if config.home not in [mount["mountPath"] for mount in mounts]:
            yield f"{pod.where}: home ({config.home}) is on no volume"


def _ports(plain: Mapping[str, Any], config: Config, documents: Sequence[Document]) -> Iterator[str]:
    if (plain["http_options"]["host"], plain["http_options"]["port"]) != (config.serve.host, config.serve.port):
        yield "http_options and serve.host, serve.port differ"
    for pod in pods(documents):
        if pod.ray and pod.ports().get("serve") != config.serve.port:
            yield f"{pod.where}: its port `serve` is not serve.port ({config.serve.port})"


def _memory(config: Config, documents: Sequence[Document]) -> Iterator[str]:
    for document in of_kind(documents, "ConfigMap"):
        if not document["metadata"]["name"].startswith("redis-traces"):
            continue
        said = dict(line.split(None, 1) for line in document["data"]["valkey.conf"].splitlines() if line[:1].isalpha())
        size = int(said["maxmemory"][:-2]) * _UNITS[said["maxmemory"][-2:]]
        if size != config.redis.maxmemory:
            yield f"redis.maxmemory is {config.redis.maxmemory}, the server's is {size}"
        if said["maxmemory-policy"] != "noeviction":
            yield "redis-traces may evict the champion"


def _limits(deployment: Mapping[str, Any], config: Config, documents: Sequence[Document]) -> Iterator[str]:
    if deployment["max_ongoing_requests"] != ongoing_limit(config):
        yield f"max_ongoing_requests is not what replicas bear ({ongoing_limit(config)})"
    most = deployment.get("autoscaling_config", {}).get("max_replicas", deployment.get("num_replicas"))
    if not deployment["max_ongoing_requests"] <= deployment["max_queued_requests"] <= most * ongoing_limit(config):
        yield f"max_queued_requests is not between one replica's and {most} replicas' requests"
    if deployment["graceful_shutdown_timeout_s"] != config.serve.drain_s:
        yield "graceful_shutdown_timeout_s is not serve.drain_s"
    if "autoscaling_config" in deployment and config.serve.replicas < 2:
        yield "serve.replicas is 1: a replica that joins others would refuse requests while it loads"
    for pod in pods(documents):
        hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if pod.ray == "replicas" and not (
            config.serve.drain_s < int(hook[-1]) < pod.spec["terminationGracePeriodSeconds"]
        ):
            yield f"{pod.where}: serve.drain_s < the hook's seconds < terminationGracePeriodSeconds does not hold"


def _placement(deployment: Mapping[str, Any], config: Config, documents: Sequence[Document]) -> Iterator[str]:
    """The largest number of replicas must fit on the largest number of nodes, with the learner."""
    cluster = ray_service(documents)["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    most = deployment.get("autoscaling_config", {}).get("max_replicas", deployment.get("num_replicas"))
    replica = {"CPU": config.serve.replica_cpus, "GPU": config.serve.replica_gpus, config.serve.replica_resource: 1}
    learner = {"CPU": config.learner.cpus, "GPU": config.learner.gpus, config.learner.resource: 1}
    room = [_node(groups["replicas"], documents) for _ in range(groups["replicas"]["maxReplicas"])]
    if "learner" in groups:
        room += [_node(groups["learner"], documents)]
    for what, wish in [("the learner", learner), *[(f"replica {n + 1}", replica) for n in range(most)]]:
        wish = {name: amount for name, amount in wish.items() if name and amount}
        free = next((node for node in room if all(node.get(name, 0) >= wish[name] for name in wish)), None)
        if free is None:
            yield f"{what} ({wish}) fits on no node"
            return
        for name, amount in wish.items():
            free[name] = round(free[name] - amount, 6)
    minimum = deployment.get("autoscaling_config", {}).get("min_replicas", deployment.get("num_replicas"))
    if groups["replicas"]["maxReplicas"] > most:
        yield f"up to {groups['replicas']['maxReplicas']} nodes for at most {most} replicas"
    if minimum > 1 and groups["replicas"]["minReplicas"] < minimum * max(config.serve.replica_gpus, 0):
        yield "fewer nodes than the least number of replicas"
    if "learner" not in groups and config.learner.resource:
        yield f"no node has the resource {config.learner.resource}"


def _node(group: Mapping[str, Any], documents: Sequence[Document]) -> dict[str, float]:
    pod: Pod = next(pod for pod in pods(documents) if pod.ray == group["groupName"])
    limits = pod.spec["containers"][0]["resources"]["limits"]
    own = {name: float(amount) for name, amount in group.get("resources", {}).items()}
    return {"CPU": float(group["rayStartParams"]["num-cpus"]), "GPU": float(limits.get("nvidia.com/gpu", 0)), **own}
