"""`redraft experiment`: the drift protocol of Online Speculative Decoding (Liu et al. 2023, arXiv:2310.07177).

Several domains in a row are answered once by the target, and every arm is replayed over the same records: drafters
that learn online, and static ones that were distilled offline. Traffic and finished arms stay on disk, so a run that
was interrupted goes on. docs/experiment.md says what is fair about the comparison, and what is not.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from rich.console import Console

from learner.base import Base, load_base
from ops import experiment_settings
from ops.demo_files import write_json
from ops.experiment_picture import draw
from ops.experiment_report import report, show
from ops.experiment_run import ArmRun
from ops.experiment_settings import ExperimentSettings
from ops.experiment_traffic import prepare
from shared.errors import ConfigError

_PIPE_WIDTH = 160
add_arguments = experiment_settings.add_arguments


def main(arguments: Namespace) -> int:
    """Returns 0, whether or not an aim was met: that is a finding, and printed as one."""
    settings = experiment_settings.read_arguments(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    base = _base(settings)
    began = time.monotonic()
    traffic = prepare(settings, base)
    answered = time.monotonic()
    said = ", ".join(f"{domain.name} {len(domain.stream)}" for domain in traffic.domains)
    console.print(
        f"{sum(traffic.tokens):,} tokens in {len(traffic.tokens)} records ({said}) after "
        f"{answered - began:.0f} s, in {settings.data}"
    )
    results = ArmRun(settings, base, traffic, console)()
    seconds = {"traffic": answered - began, "arms": time.monotonic() - answered}
    found = report(settings, traffic, results, seconds)
    show(found, console)
    draw(settings.png, traffic, results, f"{settings.config.target.model}: {said.replace(', ', ' → ')} records")
    written = [str(settings.png)]
    if settings.json is not None:
        write_json(settings.json, found)
        written.append(str(settings.json))
    console.print(f"written: {', '.join(written)}")
    return 0


def _base(settings: ExperimentSettings) -> Base:
    base = load_base(settings.config)
    if base is None or not base.feature_layers:
        problem = "nothing drafts here" if base is None else "a language model drafts here"
        raise ConfigError("drafter.model", f"{problem}; the experiment is for heads", "Name a head's folder.")
    return base
