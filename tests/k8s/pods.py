"""Every pod template of a set of manifests, wherever it stands, with the name that a message gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.k8s.kustomize import Document


@dataclass(frozen=True)
class Pod:
    where: str
    labels: dict[str, str]
    spec: dict[str, Any]
    ray: str = ""  # "head", or the name of a worker group

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def ports(self) -> dict[str, int]:
        found = [port for container in self.containers for port in container.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in found}

    def environment(self) -> list[dict[str, Any]]:
        return [variable for container in self.containers for variable in container.get("env", [])]


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def ray_service(documents: Sequence[Document]) -> Document:
    [service] = of_kind(documents, "RayService")
    return service


def pods(documents: Sequence[Document]) -> Iterator[Pod]:
    for document in documents:
        where = f"{document['kind']} {document['metadata']['name']}"
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield _pod(where, document["spec"]["template"])
        elif document["kind"] == "RayService":
            cluster = document["spec"]["rayClusterConfig"]
            yield _pod(f"{where}, head", cluster["headGroupSpec"]["template"], "head")
            for group in cluster["workerGroupSpecs"]:
                yield _pod(f"{where}, group {group['groupName']}", group["template"], group["groupName"])


def matching(documents: Sequence[Document], labels: dict[str, str]) -> list[Pod]:
    return [pod for pod in pods(documents) if labels.items() <= pod.labels.items()]


def _pod(where: str, template: dict[str, Any], ray: str = "") -> Pod:
    return Pod(where, dict(template.get("metadata", {}).get("labels", {})), template["spec"], ray)
