"""Who may do what: the Pod Security level `restricted`, and that nothing in the cluster answers without a secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.k8s.kustomize import Document
from tests.k8s.pods import of_kind, pods, ray_service
from tests.k8s.references import Secrets

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def problems(documents: Sequence[Document], secrets: Secrets) -> Iterator[str]:
    del secrets
    [namespace] = of_kind(documents, "Namespace")
    if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace does not enforce restricted"
    for pod in pods(documents):
        yield from restricted(pod.where, pod.spec)
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.where}: Kubernetes' REDRAFT_* variables would be taken for settings (enableServiceLinks)"
        if pod.ray != "head" and pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.where}: needs no token of the API server"
    cluster = ray_service(documents)["spec"]["rayClusterConfig"]
    if "autoscalerOptions" in cluster:
        context = cluster["autoscalerOptions"].get("securityContext", {})
        yield from _container("the autoscaler", context, {})
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "Ray takes calls without a token"
    yield from _servers(documents)
    if of_kind(documents, "Secret"):
        yield "a Secret is in the manifests"
    if not any(_shuts_all(policy["spec"]) for policy in of_kind(documents, "NetworkPolicy")):
        yield "no NetworkPolicy shuts everything by default"


def _shuts_all(spec: Mapping[str, Any]) -> bool:
    return spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def restricted(where: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """kubernetes.io/docs/concepts/security/pod-security-standards, level restricted."""
    for flag in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(flag):
            yield f"{where}: {flag}"
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"{where}: volume {volume['name']} is of a forbidden kind"
    pod_context = spec.get("securityContext", {})
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        yield from _container(f"{where}, {container['name']}", container.get("securityContext", {}), pod_context)
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{where}, {container['name']}: hostPort"


def _container(where: str, own: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    merged = {**pod, **own}
    if merged.get("privileged"):
        yield f"{where}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{where}: allowPrivilegeEscalation"
    if own.get("capabilities", {}).get("drop") != ["ALL"] or own.get("capabilities", {}).get("add"):
        yield f"{where}: capabilities"
    if merged.get("runAsNonRoot") is not True or merged.get("runAsUser") == 0:
        yield f"{where}: may run as root"
    if merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{where}: seccompProfile"


def _servers(documents: Sequence[Document]) -> Iterator[str]:
    started = {document["metadata"]["name"]: _command(document) for document in documents if "Set" in document["kind"]}
    for name in ("redis-traces", "redis-gcs"):
        if "requirepass $VALKEYCLI_AUTH" not in started[name]:
            yield f"{name} asks for no password"
    [mlflow] = of_kind(documents, "Deployment")
    for option in ("--app-name basic-auth", "--allowed-hosts"):
        if option not in _command(mlflow):
            yield f"MLflow is started without {option}"


def _command(document: Document) -> str:
    container = document["spec"]["template"]["spec"]["containers"][0]
    return " ".join([*container.get("command", []), *container.get("args", [])])
