"""What Prometheus would scrape from the nodes of the Ray that this process is connected to."""

from __future__ import annotations

import time

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0  # Ray's agent starts late, and passes on what it gets once in its interval


def exported(**labels: str) -> dict[str, Metric]:
    """Families with a sample that has these labels, by name, Ray's prefix cut off as the PodMonitor does."""
    import ray

    found = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            text = httpx.get(url, timeout=20).text
        except httpx.HTTPError:
            continue
        for family in text_string_to_metric_families(text):
            if any(labels.items() <= sample.labels.items() for sample in family.samples):
                found[family.name.removeprefix("ray_")] = family
    return found


def wait_for(names: set[str], **labels: str) -> dict[str, Metric]:
    """The families once all of `names` are there."""
    deadline = time.monotonic() + PATIENCE_S
    while not names <= set(found := exported(**labels)):
        assert time.monotonic() < deadline, f"never exported: {sorted(names - set(found))}"
        time.sleep(0.2)
    return found
