"""Our figures beside those of a public load generator (aiperf's JSON export) on the same server and load.

The two agree where TTFT, ITL and throughput differ by less than the tolerance. Reads one file; runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

TOLERANCE = 0.05
# Name, aiperf's metric and statistic (times in ms), and where ours is (in seconds).
_PAIRS = (
    ("TTFT mean, ms", "time_to_first_token", "avg", ("ttft", "mean"), 1e3),
    ("TTFT p50, ms", "time_to_first_token", "p50", ("ttft", "p50"), 1e3),
    ("ITL mean, ms", "inter_token_latency", "avg", ("itl", "mean"), 1e3),
    ("ITL p50, ms", "inter_token_latency", "p50", ("itl", "p50"), 1e3),
    ("output tokens/s", "output_token_throughput", "avg", ("rates", "output_tokens"), 1.0),
)


@dataclass(frozen=True)
class Beside:
    name: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def beside(report: Mapping[str, Any], file: Path) -> list[Beside]:
    """Raises ConfigError for a file that is no aiperf export of a streamed run."""
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
        return [
            Beside(name, float(report[group][key]) * scale, float(theirs[metric][statistic]))
            for name, metric, statistic, (group, key), scale in _PAIRS
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "--beside", f"{file} cannot be compared with ({error!r})", "Give aiperf's profile_export_aiperf.json"
        ) from error
