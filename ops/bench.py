"""`redraft bench`: ours and others side by side on this machine, in one run, with paired ratios and their bounds.

Loads everybody first, each in a process of its own, and lets them take turns. Ctrl-C keeps what was measured so far.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ops import bench_settings
from ops.bench_line_up import line_up
from ops.bench_picture import draw
from ops.bench_report import report, show
from ops.bench_run import BenchRun
from ops.bench_settings import BenchSettings
from ops.demo_files import write_json
from ops.local_redis import start_redis
from ops.processes import Supervisor

_PIPE_WIDTH = 140
add_arguments = bench_settings.add_arguments


def main(arguments: Namespace) -> int:
    """Returns 1 when a contender had to leave the run."""
    settings = bench_settings.read_arguments(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redraft-bench-")))
        run = BenchRun(
            settings,
            line_up(settings, _redis(settings, folder, stack)),
            folder,
            lambda text: console.print(f"  {text}"),
        )
        try:
            _measure(run, console)
        finally:
            if run.findings.results:
                _finish(run, settings, console)
    return 1 if run.findings.failed else 0


def _redis(settings: BenchSettings, folder: Path, stack: ExitStack) -> str:
    """The URL of a server for traces, where a contender publishes any."""
    if "traces" not in settings.contenders:
        return ""
    return start_redis(stack.enter_context(Supervisor(folder)), settings.config)


def _measure(run: BenchRun, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("loading", total=run.calls)
        begun = 0

        def advance(text: str) -> None:
            nonlocal begun
            bars.update(bar, description=text, completed=begun)
            begun += 1

        run(advance)
        bars.update(bar, description="done", completed=begun)


def _finish(run: BenchRun, settings: BenchSettings, console: Console) -> None:
    found = report(run.findings, settings)
    if settings.json is not None:
        write_json(settings.json, found)
    if settings.png is not None:
        draw(settings.png, found)
    show(found, console)
