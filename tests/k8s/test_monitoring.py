"""The rules by Prometheus' own tool, and every query of the dashboards by a parser and against the metrics' names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from ops.dashboards import DASHBOARDS, dashboard_json, write
from shared.metrics import LEARNER_METRICS, REDIS, SERVING_METRICS
from tests.k8s.kustomize import MANIFESTS, ROOT, overlay
from tests.k8s.pods import of_kind

COMPONENT = MANIFESTS / "components" / "monitoring"
DATA = Path(__file__).parent / "data"
# What serving, learner and Ray export (Ray's own prefix is cut off by the PodMonitor). That ours come out of a real Ray
# is what tests/serving/test_app.py and tests/learner/test_app.py show.
METRICS = {metric.name for metric in SERVING_METRICS + LEARNER_METRICS} | {"ray_serve_replica_processing_queries"}
LABELS = {metric.name: {metric.label} - {""} for metric in SERVING_METRICS + LEARNER_METRICS}
SUFFIXES = re.compile(r"_(bucket|sum|count)$")  # of a histogram


def rules() -> dict[str, Any]:
    [found] = of_kind(overlay("production"), "PrometheusRule")
    spec: dict[str, Any] = found["spec"]
    return spec


def promtool() -> str:
    found = shutil.which("promtool") or str(ROOT / "build" / "promtool")
    if not Path(found).is_file():
        message = "promtool is missing: `make promtool`, or `apt install prometheus`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def test_the_rules_do_what_their_tests_say(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules(), allow_unicode=True), encoding="utf-8")
    shutil.copy(DATA / "rules_test.yaml", tmp_path)
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([promtool(), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    alerts = {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    tests = yaml.safe_load((DATA / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if "exp_alerts" in case}
    assert fired == set(alerts)
    assert [name for name, rule in alerts.items() if not rule["annotations"].get("action")] == []
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert [name for name in alerts if name not in page] == []


def queries() -> list[str]:
    """Of rules and dashboards; Grafana's variables as it would fill them in."""
    found = [rule["expr"] for group in rules()["groups"] for rule in group["rules"]]
    panels = [panel for dashboard in DASHBOARDS for panel in dashboard_json(dashboard)["panels"]]
    found += [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5m").replace("$namespace", "redraft") for query in found]


def names_in(query: str) -> set[str]:
    text = re.sub(r'"[^"]*"', "", query)
    return set(re.findall(r"\b(?:redraft|ray)[_:][a-zA-Z0-9_:]+", text))


@pytest.mark.parametrize("query", queries())
def test_a_query_can_be_parsed_and_names_what_there_is(query: str) -> None:
    promql_parser.parse(query)
    recorded = {rule["record"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule}
    unknown = {name for name in names_in(query) if name not in recorded and SUFFIXES.sub("", name) not in METRICS}
    assert unknown == set()
    assert names_in(query)


@pytest.mark.parametrize("query", queries())
def test_a_query_groups_by_and_asks_for_labels_that_its_metrics_have(query: str) -> None:
    grouped = {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(",")}
    asked = set(re.findall(r"[{,](\w+)=", query))
    ours = [LABELS[base] for name in names_in(query) if (base := SUFFIXES.sub("", name)) in LABELS]
    if ours:  # others are made of these, or Ray's
        assert (grouped | asked) - {"namespace", "le"} <= set.union(*ours)


def test_the_rules_tests_and_the_pages_name_what_there_is() -> None:
    for file in (DATA / "rules_test.yaml", ROOT / "docs" / "kubernetes.md", ROOT / "docs" / "api.md"):
        named = set(re.findall(r"\bredraft_[a-z0-9_]+", file.read_text(encoding="utf-8")))
        assert {name for name in named if SUFFIXES.sub("", name) not in METRICS | {REDIS.name}} == set(), file


def test_the_monitor_cuts_off_rays_prefix_and_nothing_else() -> None:
    [found] = of_kind(overlay("production"), "PodMonitor")
    [endpoint] = found["spec"]["podMetricsEndpoints"]
    [renaming] = [rule for rule in endpoint["metricRelabelings"] if rule.get("targetLabel") == "__name__"]
    for name in METRICS:
        exported = name if name.startswith("ray_") else f"ray_{name}"
        match = re.fullmatch(renaming["regex"], exported)
        assert (match.group(1) if match else exported) == name


def test_the_parser_refuses_what_prometheus_would() -> None:
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (namespace) rate(redraft_emitted_tokens_total[5m])")


def test_the_committed_dashboards_are_the_generated_ones(tmp_path: Path) -> None:
    write(tmp_path)
    for file in tmp_path.iterdir():
        committed = COMPONENT / "dashboards" / file.name
        assert committed.read_text(encoding="utf-8") == file.read_text(encoding="utf-8"), (
            f"python -m ops.dashboards {committed.parent.relative_to(ROOT)}"
        )
    [config] = [d for d in of_kind(overlay("production"), "ConfigMap") if d["metadata"]["name"] == "redraft-dashboards"]
    assert {json.loads(text)["uid"] for text in config["data"].values()} == {board.uid for board in DASHBOARDS}
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_panels_do_not_overlap() -> None:
    for dashboard in DASHBOARDS:
        places = [panel["gridPos"] for panel in dashboard_json(dashboard)["panels"]]
        assert len({(place["x"], place["y"]) for place in places}) == len(places)
        assert all(place["x"] + place["w"] <= 24 for place in places)  # Grafana's columns
