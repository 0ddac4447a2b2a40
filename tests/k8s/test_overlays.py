"""Each overlay may be applied; and a copy with one thing broken may not, whatever it is."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.checks import problems
from tests.k8s.kustomize import MANIFESTS, OVERLAYS, Document, build, overlay
from tests.k8s.pods import of_kind, ray_service


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_may_be_applied(name: str) -> None:
    assert problems(overlay(name)) == []


@pytest.mark.parametrize("component", ["weights-object-store", "incremental-upgrade", "monitoring", "learner-gpu"])
def test_components_that_an_overlay_leaves_out_fit_it(component: str, tmp_path: Path) -> None:
    """With the configuration that their text asks for."""
    manifests = copy_of_manifests(tmp_path)
    file = manifests / "overlays" / "staging" / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    line = f"  - ../../components/{component}\n"
    if line not in text:
        text = text.replace("components:\n", f"components:\n{line}", 1)
    text = text.replace("- artifacts=", "- weights=store:redraft-staging/target\n      - artifacts=")
    text = text.replace("images:", "images:\n  - {name: redraft-copy, newName: rclone/rclone, newTag: 1.71.2} #", 1)
    if component == "weights-object-store":
        text = text.replace("  - ../../components/weights-hub\n", "")
    file.write_text(text, encoding="utf-8")
    if component == "learner-gpu":
        settings = manifests / "overlays" / "staging" / "serve.yaml"
        own = (
            "learner.gpus: 1\n          learner.resource: learner_node\n          serve.replica_resource: replica_node"
        )
        settings.write_text(settings.read_text(encoding="utf-8").replace("learner.gpus: 0.3", own), encoding="utf-8")
    assert problems(build(file.parent)) == []


def first_container(documents: list[Document], kind: str, name: str) -> dict[str, Any]:
    [found] = [d for d in of_kind(documents, kind) if d["metadata"]["name"] == name]
    container: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return container


def worker(documents: list[Document], number: int = 0) -> dict[str, Any]:
    group: dict[str, Any] = ray_service(documents)["spec"]["rayClusterConfig"]["workerGroupSpecs"][number]
    return group


def serve_says(old: str, new: str) -> Callable[[list[Document]], None]:
    def change(documents: list[Document]) -> None:
        spec = ray_service(documents)["spec"]
        assert old in spec["serveConfigV2"], f"{old} is not there to be broken"
        spec["serveConfigV2"] = spec["serveConfigV2"].replace(old, new, 1)

    return change


def misspell(
    change: Callable[[list[Document]], dict[str, Any]], old: str, new: str
) -> Callable[[list[Document]], None]:
    def rename(documents: list[Document]) -> None:
        holder = change(documents)
        holder[new] = holder.pop(old)

    return rename


def put(holder: Callable[[list[Document]], Any], key: Any, value: Any) -> Callable[[list[Document]], None]:
    def change(documents: list[Document]) -> None:
        holder(documents)[key] = value

    return change


def mlflow(documents: list[Document]) -> dict[str, Any]:
    return first_container(documents, "Deployment", "mlflow")


def cluster(documents: list[Document]) -> dict[str, Any]:
    found: dict[str, Any] = ray_service(documents)["spec"]["rayClusterConfig"]
    return found


def replica(documents: list[Document]) -> dict[str, Any]:
    found: dict[str, Any] = worker(documents)["template"]["spec"]["containers"][0]
    return found


def variable(documents: list[Document], name: str) -> dict[str, Any]:
    return next(entry for entry in replica(documents)["env"] if entry["name"] == name)


def named(kind: str, name: str) -> Callable[[list[Document]], Document]:
    return lambda documents: next(d for d in of_kind(documents, kind) if d["metadata"]["name"] == name)


# What is broken, how, and a word of the complaint.
BREAKS: dict[str, tuple[Callable[[list[Document]], None], str]] = {
    "a field of a core kind": (misspell(mlflow, "readinessProbe", "readynessProbe"), "readynessProbe"),
    "a field of Ray's kind": (misspell(cluster, "enableInTreeAutoscaling", "enableAutoscaling"), "enableAutoscaling"),
    "a field of a pod of Ray": (misspell(replica, "volumeMounts", "volumeMount"), "volumeMount"),
    "a value of Ray's kind": (put(worker, "minReplicas", "two"), "minReplicas"),
    "a field of a rule": (
        misspell(lambda d: named("PrometheusRule", "redraft")(d)["spec"]["groups"][1]["rules"][0], "for", "after"),
        "after",
    ),
    "a key of a Secret": (
        put(lambda d: variable(d, "TRACES_PASSWORD")["valueFrom"]["secretKeyRef"], "key", "trace-password"),
        "has no key trace-password",
    ),
    "a Secret": (
        put(
            lambda d: cluster(d)["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"], "name", "x"
        ),
        "there is no x",
    ),
    "a ConfigMap": (lambda d: d.remove(named("ConfigMap", "object-store")(d)), "object-store"),
    "a claim": (lambda d: d.remove(named("PersistentVolumeClaim", "learner-home")(d)), "learner-home"),
    "a Service": (lambda d: d.remove(named("Service", "redis-gcs")(d)), "no Service redis-gcs"),
    "a port of a Service": (
        put(lambda d: named("Service", "mlflow")(d)["spec"]["ports"][0], "port", 80),
        "no port 5000",
    ),
    "a named port": (
        put(lambda d: named("Service", "mlflow")(d)["spec"]["ports"][0], "targetPort", "web"),
        "named web",
    ),
    "a selector": (
        put(
            lambda d: named("PodDisruptionBudget", "redraft-replicas")(d)["spec"],
            "selector",
            {"matchLabels": {"a": "b"}},
        ),
        "selects no pod",
    ),
    "a budget in percent": (
        put(lambda d: named("PodDisruptionBudget", "redraft-replicas")(d)["spec"], "minAvailable", "50%"),
        "whole minAvailable",
    ),
    "a port that is scraped": (
        put(lambda d: named("PodMonitor", "redraft")(d)["spec"]["podMetricsEndpoints"][0], "port", "metric"),
        "no port named metric",
    ),
    "an image": (put(replica, "image", "redraft"), "has no version"),
    "a variable of ours": (
        lambda d: replica(d)["env"].append({"name": "REDRAFT_ENGINE_MAXBATCH", "value": "1"}),
        "REDRAFT_ENGINE_MAXBATCH",
    ),
    "the order of variables": (lambda d: replica(d)["env"].reverse(), "is not set before it"),
    "a node that sees other settings": (
        put(lambda d: variable(d, "REDRAFT_REDIS_URL"), "value", "redis://other:6379/0"),
        "different",
    ),
    "a config key": (serve_says("engine.max_batch", "engine.max_batches"), "engine.max_batches"),
    "a config value": (serve_says("drafter.kind: model", "drafter.kind: medusa"), "drafter.kind"),
    "a key of Serve's": (serve_says("upscale_delay_s", "upscale_delay"), "Serve has no upscale_delay"),
    "the YAML of Serve's config": (serve_says("applications:", "applications: ["), "serveConfigV2"),
    "an import path": (serve_says("learner.app:build", "learner.app:make"), "cannot be imported"),
    "the policy": (serve_says("serving.scaling:by_requests", "serving.scaling:by_magic"), "serving.scaling"),
    "a deployment's name": (serve_says("- name: Replica", "- name: Replicas"), "no deployment Replicas"),
    "settings of the learner alone": (serve_says("args: *settings", "args: {home: /elsewhere}"), "different settings"),
    "authentication switched off": (serve_says("serve.auth: keys", "serve.auth: 'off'"), "must carry a key"),
    "a keys file that is nowhere": (
        serve_says("/etc/redraft/keys/keys.json", "/etc/keys.json"),
        "in no mounted Secret",
    ),
    "a port": (serve_says("  port: 8000", "  port: 8001"), "http_options"),
    "a limit": (serve_says("max_ongoing_requests: 416", "max_ongoing_requests: 100"), "max_ongoing_requests"),
    "a drain longer than the pod's": (
        put(lambda d: worker(d)["template"]["spec"], "terminationGracePeriodSeconds", 60),
        "hook",
    ),
    "room for replicas": (put(worker, "maxReplicas", 4), "fits on no node"),
    "the learner's node": (lambda d: cluster(d)["workerGroupSpecs"].pop(), "fits on no node"),
    "memory of Redis": (serve_says("redis.maxmemory: 1073741824", "redis.maxmemory: 2147483648"), "redis.maxmemory"),
    "Ray without a token": (put(lambda d: cluster(d)["authOptions"], "mode", "disabled"), "without a token"),
    "MLflow without passwords": (
        lambda d: mlflow(d).update(args=[mlflow(d)["args"][0].replace("--app-name basic-auth", "")]),
        "basic-auth",
    ),
    "Redis without a password": (
        put(lambda d: first_container(d, "StatefulSet", "redis-traces"), "args", ["exec valkey-server"]),
        "asks for no password",
    ),
    "a container that may become root": (
        put(lambda d: mlflow(d)["securityContext"], "allowPrivilegeEscalation", True),
        "Escalation",
    ),
    "variables of Kubernetes": (
        lambda d: worker(d)["template"]["spec"].pop("enableServiceLinks"),
        "enableServiceLinks",
    ),
    "the shut door": (lambda d: d.remove(named("NetworkPolicy", "nothing-by-default")(d)), "by default"),
    "a Secret in the manifests": (
        lambda d: d.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}, "stringData": {"a": "b"}}),
        "a Secret is in the manifests",
    ),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_one_broken_thing_is_found(broken: str) -> None:
    change, word = BREAKS[broken]
    documents = copy.deepcopy(overlay("production"))
    change(documents)
    found = problems(documents)
    assert any(word in problem for problem in found), found


def test_a_patch_of_what_is_not_there_does_not_build(tmp_path: Path) -> None:
    manifests = copy_of_manifests(tmp_path)
    file = manifests / "components" / "gpu-workers" / "kustomization.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("workerGroupSpecs/0/template", "workerGroups/0/template"))
    with pytest.raises(AssertionError, match="workerGroups"):
        build(manifests / "overlays" / "production")


def copy_of_manifests(folder: Path) -> Path:
    return Path(shutil.copytree(MANIFESTS, folder / "k8s"))
