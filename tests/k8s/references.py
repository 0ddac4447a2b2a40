"""Every name that one object says of another: it must be there, with the key or the port that is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.k8s.kustomize import Document
from tests.k8s.pods import Pod, matching, of_kind, pods, ray_service

Secrets = Mapping[str, frozenset[str]]  # name -> keys: what the page tells the engineer to create
_HOST = re.compile(r"(?:^|//|@)([a-z][a-z0-9-]*):(\d{2,5})(?:/|$)")
_MADE_BY_KUBERAY = {"redraft-serve-svc": 8000, "redraft-head-svc": 8265}


def problems(documents: Sequence[Document], secrets: Secrets) -> Iterator[str]:
    for pod in pods(documents):
        yield from _variables(pod, documents, secrets)
        yield from _volumes(pod, documents, secrets)
        yield from _hosts(pod.where, _texts(pod.environment()), documents)
    options = ray_service(documents)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    yield from _key("gcsFaultToleranceOptions", options["redisPassword"]["valueFrom"]["secretKeyRef"], secrets)
    yield from _hosts("gcsFaultToleranceOptions", [options["redisAddress"]], documents)
    yield from _services(documents)
    yield from _selectors(documents)
    yield from _images(documents)


def _variables(pod: Pod, documents: Sequence[Document], secrets: Secrets) -> Iterator[str]:
    for container in pod.containers:
        known: set[str] = set()
        for variable in container.get("env", []):
            where = f"{pod.where}, {variable['name']}"
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                yield from _key(where, source["secretKeyRef"], secrets)
            if "configMapKeyRef" in source:
                yield from _key(where, source["configMapKeyRef"], _config_maps(documents))
            # Kubernetes leaves $(NAME) as it is when NAME comes later or never.
            for name in re.findall(r"\$\((\w+)\)", variable.get("value", "")):
                if name not in known:
                    yield f"{where}: $({name}) is not set before it"
            known.add(variable["name"])


def _volumes(pod: Pod, documents: Sequence[Document], secrets: Secrets) -> Iterator[str]:
    claims = {claim["metadata"]["name"] for claim in of_kind(documents, "PersistentVolumeClaim")}
    names = set()
    for volume in pod.spec.get("volumes", []):
        names.add(volume["name"])
        where = f"{pod.where}, volume {volume['name']}"
        if "secret" in volume and volume["secret"]["secretName"] not in secrets:
            yield f"{where}: there is no Secret {volume['secret']['secretName']}"
        if "configMap" in volume and volume["configMap"]["name"] not in _config_maps(documents):
            yield f"{where}: there is no ConfigMap {volume['configMap']['name']}"
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in claims:
            yield f"{where}: there is no claim {volume['persistentVolumeClaim']['claimName']}"
    for document in of_kind(documents, "StatefulSet"):
        if pod.where.endswith(document["metadata"]["name"]):
            names |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
    mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
    yield from (f"{pod.where}: volume {name} is mounted, but there is none" for name in sorted(mounted - names))
    yield from (f"{pod.where}: volume {name} is mounted nowhere" for name in sorted(names - mounted))


def _key(where: str, reference: Mapping[str, Any], known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    if reference["name"] not in known:
        if not reference.get("optional"):
            yield f"{where}: there is no {reference['name']}"
    elif reference["key"] not in known[reference["name"]] and not reference.get("optional"):
        yield f"{where}: {reference['name']} has no key {reference['key']}"


def _config_maps(documents: Sequence[Document]) -> dict[str, frozenset[str]]:
    return {d["metadata"]["name"]: frozenset(d.get("data", {})) for d in of_kind(documents, "ConfigMap")}


def _texts(environment: Sequence[Mapping[str, Any]]) -> list[str]:
    return [variable.get("value", "") for variable in environment]


def hosts_of(text: str) -> list[tuple[str, int]]:
    return [(host, int(port)) for host, port in _HOST.findall(text) if host != "localhost"]


def _hosts(where: str, texts: Sequence[str], documents: Sequence[Document]) -> Iterator[str]:
    for text in texts:
        for host, port in hosts_of(text):
            yield from reachable(where, host, port, documents)


def reachable(where: str, host: str, port: int, documents: Sequence[Document]) -> Iterator[str]:
    """A short name is a Service of this namespace."""
    services = {d["metadata"]["name"]: {p["port"] for p in d["spec"]["ports"]} for d in of_kind(documents, "Service")}
    if host not in services:
        yield f"{where}: there is no Service {host}"
    elif port not in services[host]:
        yield f"{where}: Service {host} has no port {port}"


def _services(documents: Sequence[Document]) -> Iterator[str]:
    for service in of_kind(documents, "Service"):
        where = f"Service {service['metadata']['name']}"
        found = matching(documents, service["spec"]["selector"])
        if not found:
            yield f"{where}: selects no pod"
        for port in service["spec"]["ports"]:
            for pod in found:
                if port["targetPort"] not in pod.ports():
                    yield f"{where}: {pod.where} has no port named {port['targetPort']}"
    for ingress in of_kind(documents, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                if _MADE_BY_KUBERAY.get(service["name"]) != service["port"]["number"]:
                    yield f"Ingress {ingress['metadata']['name']}: there is no {service['name']}:{service['port']}"


def _selectors(documents: Sequence[Document]) -> Iterator[str]:
    for budget in of_kind(documents, "PodDisruptionBudget"):
        if not matching(documents, budget["spec"]["selector"]["matchLabels"]):
            yield f"PodDisruptionBudget {budget['metadata']['name']}: selects no pod"
        if not isinstance(budget["spec"].get("minAvailable"), int):
            yield f"PodDisruptionBudget {budget['metadata']['name']}: pods of Ray need a whole minAvailable"
    for monitor in of_kind(documents, "PodMonitor"):
        found = matching(documents, monitor["spec"]["selector"]["matchLabels"])
        if len(found) != sum(1 for pod in pods(documents) if pod.ray):
            yield f"PodMonitor {monitor['metadata']['name']}: misses nodes of Ray"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for pod in found:
                if endpoint["port"] not in pod.ports():
                    yield f"PodMonitor: {pod.where} has no port named {endpoint['port']}"
    for policy in of_kind(documents, "NetworkPolicy"):
        for labels in _pod_selectors(policy["spec"]):
            absent = labels == {"app.kubernetes.io/name": "postgres"}  # production has a managed one
            if not absent and not matching(documents, labels):
                yield f"NetworkPolicy {policy['metadata']['name']}: {labels} selects no pod"


def _pod_selectors(spec: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    selectors = [spec["podSelector"]]
    for rule in (*spec.get("ingress", []), *spec.get("egress", [])):
        for peer in (*rule.get("from", []), *rule.get("to", [])):
            if "podSelector" in peer:
                selectors.append(peer["podSelector"])
    for selector in selectors:
        yield dict(selector.get("matchLabels", {}))
        for expression in selector.get("matchExpressions", []):
            yield from ({expression["key"]: value} for value in expression["values"])


def _images(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for container in pod.containers:
            name, _, tag = container["image"].rpartition(":")
            if not name or "/" in tag or tag == "latest":
                yield f"{pod.where}: image {container['image']} has no version: the overlay's `images` miss it"
