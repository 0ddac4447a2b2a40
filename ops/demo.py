"""`redraft demo`: real traffic on a real stack, drifting twice, while α falls and comes back before your eyes.

Starts the local stack, drives it over HTTP, shows it live, and ends with a summary, a picture and, if asked, JSON.
`--minutes` is the time for everything, start and end included. Ctrl-C keeps what was seen so far.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from ops import settings
from ops.demo_chat import Asking, served_model
from ops.demo_display import display_for
from ops.demo_files import about, require_writable, write_json, write_picture
from ops.demo_plan import Plan, built_in_plan, plan_of_rows
from ops.demo_report import report
from ops.demo_run import DemoRun, Session
from ops.demo_settings import demo_settings, empty_home, status_command
from ops.demo_sources import StackSources
from ops.demo_summary import summary
from ops.demo_watch import Watch
from ops.stack import Stack
from ops.traffic_file import read_traffic
from shared.errors import RedraftError

MINUTES = 14.5
_END_S, _END_SHARE = 60.0, 0.15  # of the budget, for draining, the picture and stopping
_LEAST_TRAFFIC_S = 30.0
_PIPE_WIDTH = 100


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser, no_learn="the control: the learner measures, but nothing is promoted")
    parser.add_argument("--minutes", type=_positive, default=MINUTES, metavar="M", help="minutes for the whole run")
    parser.add_argument("--users", type=_count, default=8, metavar="N", help="concurrent users")
    parser.add_argument("--max-tokens", type=_count, default=96, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--traffic", type=Path, metavar="FILE", help="JSONL to send; default: the built-in phases")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts' choice and order")
    parser.add_argument("--png", type=Path, default=Path("alpha.png"), metavar="FILE", help="picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--keep", action="store_true", help="leave the stack up at the end, until Ctrl-C")
    parser.add_argument("--plain-output", action="store_true", help="lines instead of the live view")


def main(arguments: Namespace) -> int:
    began = time.monotonic()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    chosen = demo_settings(arguments)
    require_writable("--png", arguments.png)
    require_writable("--json", arguments.json)
    plan = plan_of_rows(read_traffic(arguments.traffic)) if arguments.traffic else built_in_plan(arguments.seed)
    empty_home(chosen.config.home_path)
    console.print(f"Starting, {arguments.minutes:g} minutes in all (Ctrl-C stops everything) …")
    with Stack(chosen.config, named=chosen.named, say=lambda text: console.print(f"  {text}")) as stack:
        _run(arguments, plan, stack, console, deadline=began + 60 * arguments.minutes)
        if arguments.keep:
            _keep(stack, console)
    return 0


def _run(arguments: Namespace, plan: Plan, stack: Stack, console: Console, *, deadline: float) -> None:
    session = _session(arguments, stack, deadline)
    sources = StackSources(stack.config, stack.urls.api)
    run = DemoRun(session, plan, stack, Watch(sources))
    try:
        with display_for(console, plain_output=arguments.plain_output) as display:
            run(display)
    except (KeyboardInterrupt, SystemExit):
        console.print("Stopped early; this is what was seen:")
        raise
    except RedraftError:
        console.print("The stack was lost; this is what was seen:")
        raise
    finally:
        sources.close()
        _finish(run, arguments, session.asking.model, console)


def _session(arguments: Namespace, stack: Stack, deadline: float) -> Session:
    model, urls, config = served_model(stack.urls.api), stack.urls, stack.config
    end_s = min(_END_S, _END_SHARE * 60 * arguments.minutes)
    return Session(
        api=urls.api,
        urls={"API": f"{urls.api}/v1", "MLflow": urls.mlflow},
        asking=Asking(model, arguments.max_tokens, arguments.temperature),
        users=arguments.users,
        seconds=max(deadline - end_s - time.monotonic(), _LEAST_TRAFFIC_S),
        deadline=max(deadline, time.monotonic() + _LEAST_TRAFFIC_S + end_s),
        learning=not arguments.no_learn,
        measuring=config.learner.enabled and config.trace.enabled and config.drafter.kind != "none",
        seed=arguments.seed,
        about=about(config.to_dict()),
    )


def _finish(run: DemoRun, arguments: Namespace, model: str, console: Console) -> None:
    result = run.result
    if not result.answers:
        console.print("Nothing was answered yet, so there is nothing to show.")
        return
    found = report(result)
    console.print(summary(found))
    write_picture(arguments.png, result, found, model)
    written = [str(arguments.png)]
    if arguments.json:
        write_json(arguments.json, found)
        written.append(str(arguments.json))
    console.print(f"  written: {', '.join(written)}")


def _keep(stack: Stack, console: Console) -> None:
    """Until Ctrl-C, which is the asked-for end and no failure."""
    console.print(
        f"The stack stays up until Ctrl-C:\n  API    {stack.urls.api}/v1\n  MLflow {stack.urls.mlflow}\n"
        f"  Redis  {stack.urls.redis}\n  watch  {status_command(stack.config)}",
        soft_wrap=True,
    )
    try:
        while True:
            time.sleep(1)
            for name in stack.tend():
                console.print(f"{name} had ended and was started again")
    except KeyboardInterrupt:
        console.print("Stopping …")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2")
    return value
