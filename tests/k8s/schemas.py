"""Shapes: core kinds by Kubernetes' own schemas, RayService by its definition, the monitoring kinds by ours.

All strict: a field that the schema does not know is a problem, because the API server would drop it silently.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.k8s.kustomize import Document

DATA = Path(__file__).parent / "data"
VERSION = "1.34"  # of Kubernetes: what managed clusters run
_SERVER_SIDE = "x-kubernetes-"  # words of the API server's, not of JSON Schema


def problems(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        where = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
        if document.get("apiVersion") == "ray.io/v1":
            whole = with_defaults(document, ray_schema(document["kind"]))
            yield from _by_schema(where, whole, strict_ray_schema(document["kind"]))
        elif str(document.get("apiVersion")).startswith("monitoring.coreos.com/"):
            yield from _by_schema(where, document, monitoring_schemas()[document["kind"]])
        else:
            yield from (f"{where}: {problem}" for problem in _core(json.dumps(document)))


@cache  # the library reads megabytes of schemas at each call, and few documents differ between two copies
def _core(document: str) -> tuple[str, ...]:
    try:
        kubernetes_validate.validate(json.loads(document), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"{'.'.join(map(str, error.path))}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (str(error),)
    return ()


def _by_schema(where: str, document: Document, schema: dict[str, Any]) -> Iterator[str]:
    for error in Draft202012Validator(schema).iter_errors(document):
        yield f"{where}: {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


@cache
def ray_schema(kind: str) -> dict[str, Any]:
    assert kind == "RayService", f"there is no definition of {kind} here"
    with gzip.open(DATA / "ray.io_rayservices.yaml.gz", "rt", encoding="utf-8") as file:
        definition = yaml.load(file, Loader=yaml.CSafeLoader)
    [version] = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


@cache
def strict_ray_schema(kind: str) -> dict[str, Any]:
    return strict(ray_schema(kind))


@cache
def monitoring_schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = yaml.safe_load((DATA / "monitoring.yaml").read_text(encoding="utf-8"))
    return schemas


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The same shapes as JSON Schema, taking no field that is not named."""
    plain = {key: value for key, value in schema.items() if not key.startswith(_SERVER_SIDE) and key != "default"}
    if schema.get("x-kubernetes-int-or-string"):
        plain.pop("type", None)
        plain.pop("anyOf", None)
        plain["type"] = ["integer", "string"]
    if "properties" in plain:
        plain["properties"] = {name: strict(part) for name, part in plain["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            plain.setdefault("additionalProperties", False)
    if isinstance(plain.get("items"), dict):
        plain["items"] = strict(plain["items"])
    if isinstance(plain.get("additionalProperties"), dict):
        plain["additionalProperties"] = strict(plain["additionalProperties"])
    # The whole of `metadata` is the API server's own business, and the definition only says that it is an object.
    return plain


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server completes it before it validates: without them, a port lacks its required protocol."""
    if isinstance(value, dict):
        whole = dict(value)
        for name, part in schema.get("properties", {}).items():
            if name not in whole and "default" in part:
                whole[name] = copy.deepcopy(part["default"])
            if name in whole:
                whole[name] = with_defaults(whole[name], part)
        return whole
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [with_defaults(item, schema["items"]) for item in value]
    return value
