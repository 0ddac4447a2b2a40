"""`python -m ops.dashboards FOLDER`: Grafana's dashboards as JSON, made from the table below.

A panel is a title, a unit and queries; places are given out in order, three to a row. The files are committed, and a
test compares them with what this makes, so that an edit by hand in Grafana is not lost unnoticed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, ACROSS = 8, 8, 3  # of a panel in Grafana's 24 columns
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HERE = '{namespace="$namespace"}'


@dataclass(frozen=True)
class Panel:
    """`queries` are (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    meaning: str = ""


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) (rate({metric}_bucket{_HERE}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))


def rate(metric: str, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{_HERE}[$__rate_interval]))"


SERVING = Dashboard(
    "redraft-serving",
    "Redraft: serving",
    (
        Panel("Tokens a second", "short", ((f"redraft:emitted_tokens:rate5m{_HERE}", "emitted"),)),
        Panel("Time to the first token", "s", quantiles("redraft_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("redraft_inter_token_latency_seconds")),
        Panel(
            "α",
            "percentunit",
            (
                (f"redraft:alpha:ratio_rate5m{_HERE}", "5 minutes"),
                (f"redraft:alpha:ratio_rate1h{_HERE}", "1 hour"),
            ),
            "accepted / tested: the chance that a drafted position is accepted, given that it was reached",
        ),
        Panel(
            "Tokens in a step",
            "short",
            ((f"1 + redraft:accepted_per_draft:ratio_rate5m{_HERE}", "per drafted step"),),
            "accepted drafts and the token that the target adds",
        ),
        Panel(
            "Accepted by position",
            "percentunit",
            ((f"redraft:accepted_by_position:ratio_rate15m{_HERE}", "{{position}}"),),
            "share of drafts whose n-th token was kept",
        ),
        Panel(
            "Gamma",
            "short",
            ((f"{rate('redraft_spec_decode_num_draft_tokens_total')} / {rate('redraft_steps_total')}", "mean"),),
            "tokens drafted in a step; 0 is plain decoding",
        ),
        Panel("Where the time goes", "s", ((rate("redraft_phase_seconds_total", "phase"), "{{phase}}"),)),
        Panel("KV cache", "percentunit", ((f"redraft_kv_usage_ratio{_HERE}", "{{pod}}"),)),
        Panel(
            "Requests that run and wait",
            "short",
            ((f"sum by (deployment) (ray_serve_replica_processing_queries{_HERE})", "in replicas"),),
        ),
        Panel("Replicas", "short", ((f"count(redraft_kv_usage_ratio{_HERE})", "that report"),)),
        Panel(
            "Drafted and accepted",
            "short",
            (
                (rate("redraft_spec_decode_num_draft_tokens_total"), "drafted"),
                (rate("redraft_tested_tokens_total"), "tested"),
                (rate("redraft_spec_decode_num_accepted_tokens_total"), "accepted"),
            ),
        ),
    ),
)

LEARNING = Dashboard(
    "redraft-learning",
    "Redraft: the learning loop",
    (
        Panel("α by domain", "percentunit", ((f"redraft:alpha_by_domain:ratio_rate15m{_HERE}", "{{domain}}"),)),
        Panel(
            "Replicas by drafter version",
            "short",
            ((f"count by (version) (redraft_drafter_info{_HERE} > 0)", "{{version}}"),),
        ),
        Panel(
            "Gate decisions",
            "short",
            (
                (
                    f"sum by (decision) (increase(redraft_gate_decisions_total{_HERE}[$__rate_interval]))",
                    "{{decision}}",
                ),
            ),
        ),
        Panel("Traces waiting in replicas", "short", ((f"sum (redraft_trace_queue{_HERE})", "records"),)),
        Panel("Traces lost", "short", ((rate("redraft_traces_dropped_total"), "a second"),)),
        Panel("Pause of a swap", "s", quantiles("redraft_swap_pause_seconds")),
        Panel(
            "Since the learner's last heartbeat",
            "s",
            ((f"time() - max(redraft_learner_heartbeat_timestamp_seconds{_HERE})", "seconds"),),
        ),
    ),
)
DASHBOARDS = (SERVING, LEARNING)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["redraft"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_variable(), _namespace_variable()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _namespace_variable() -> dict[str, Any]:
    query = "label_values(redraft_kv_usage_ratio, namespace)"
    return {"name": "namespace", "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, ACROSS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def write(folder: Path, dashboards: Sequence[Dashboard] = DASHBOARDS) -> None:
    for dashboard in dashboards:
        text = json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=False)
        (folder / f"{dashboard.uid}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
