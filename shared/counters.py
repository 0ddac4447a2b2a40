"""Cumulative counters, by name and optionally by domain and drafter version (law 10: never a ratio).

A field on the wire is `name`, `name|domain=d|version=v`; adding up replicas is adding up fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Counters:
    """A dictionary of sums that can be cut by domain and by version."""

    def __init__(self, fields: Mapping[str, float] | None = None) -> None:
        self.fields: dict[str, float] = dict(fields or {})

    def add(self, name: str, value: float = 1, *, domain: str = "", version: str = "") -> None:
        key = field_of(name, domain, version)
        self.fields[key] = self.fields.get(key, 0) + value

    def total(self, name: str, *, domain: str | None = None, version: str | None = None) -> float:
        """The sum over all fields of `name`; a given domain or version keeps only its own."""
        found = 0.0
        for key, value in self.fields.items():
            field, tags = parse_field(key)
            if field != name:
                continue
            if domain is not None and tags.get("domain") != _clean(domain):
                continue
            if version is not None and tags.get("version") != _clean(version):
                continue
            found += value
        return found

    def alpha_counts(self, *, domain: str | None = None, version: str | None = None) -> tuple[float, float]:
        """(accepted, tested)."""
        return (
            self.total("accepted", domain=domain, version=version),
            self.total("tested", domain=domain, version=version),
        )

    def alpha_rows(self) -> list[dict[str, Any]]:
        """domain, version, accepted and tested of each pair of which something was tested, in order of first use."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for key, value in self.fields.items():
            name, tags = parse_field(key)
            if name in ("accepted", "tested"):
                pair = tags.get("domain", ""), tags.get("version", "")
                row = rows.setdefault(pair, {"domain": pair[0], "version": pair[1], "accepted": 0.0, "tested": 0.0})
                row[name] += value
        return [row for row in rows.values() if row["tested"]]

    def tag_values(self, tag: str) -> list[str]:
        """Every value that a tag (domain, version) takes, in order of first use."""
        return list(dict.fromkeys(tags[tag] for tags in map(_tags, self.fields) if tag in tags))

    def minus(self, older: Counters) -> Counters:
        """What came since `older`; a replica that restarted counts from 0."""
        return Counters({key: value - min(older.fields.get(key, 0), value) for key, value in self.fields.items()})

    @classmethod
    def merge(cls, parts: Iterable[Mapping[str, float]]) -> Counters:
        merged: dict[str, float] = {}
        for part in parts:
            for key, value in part.items():
                merged[key] = merged.get(key, 0) + value
        return cls(merged)


def field_of(name: str, domain: str = "", version: str = "") -> str:
    tags = "".join(f"|{tag}={_clean(value)}" for tag, value in (("domain", domain), ("version", version)) if value)
    return name + tags


def parse_field(key: str) -> tuple[str, dict[str, str]]:
    name, *tags = key.split("|")
    return name, dict(tag.split("=", 1) for tag in tags)


def _tags(key: str) -> dict[str, str]:
    return parse_field(key)[1]


def _clean(value: str) -> str:
    return value.replace("|", "_").replace("=", "_")
