"""The `redraft` command: finds the subcommand's module, runs it, and turns how it ended into an exit code.

A subcommand is a module with `add_arguments(parser)` and `main(arguments)`, imported only when it is asked for. Our
own errors are one line and exit code 2; Ctrl-C is 130, SIGTERM 143, a hang-up 129, each after everything is cleaned up.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import NoReturn

from shared.errors import RedraftError

INTERRUPTED, REFUSED, PIPE_CLOSED = 130, 2, 141


class Help(HelpFormatter):
    """Every flag with a default says it."""

    def _get_help_string(self, action: Action) -> str | None:
        text, default = action.help or "", action.default
        if "default" in text or isinstance(default, bool | list) or default in (None, SUPPRESS, ""):
            return text
        return f"{text} (default: %(default)s)"


@dataclass(frozen=True)
class Command:
    module: str
    meaning: str


COMMANDS = {
    "up": Command("ops.up", "start the local stack and serve until Ctrl-C"),
    "status": Command("ops.status", "show what the running stack does: replicas, α, champion, learner"),
    "config": Command("ops.show_config", "show the effective configuration and where each value comes from"),
    "drafters": Command("ops.drafters", "list, compare, promote, pin, export and roll back versions of the drafter"),
    "keys": Command("ops.keys", "make, list and revoke API keys"),
    "erase": Command("ops.erase", "remove one tenant's traces and every version that has learnt from them"),
    "demo": Command("ops.demo", "watch α fall at a drift of the traffic and come back"),
    "report": Command("ops.report", "which drafts are rejected: an atlas of the live stream or of recorded traces"),
    "doctor": Command("ops.doctor", "is the set-up right, and why is α low: faults with evidence and remedy"),
    "plan": Command("ops.plan", "replicas, devices and cost for a load, from a model's config and a device's figures"),
    "bench": Command("ops.bench", "measure ours and others side by side on this machine"),
    "experiment": Command("ops.experiment", "replay drifting traffic: drafters that learn online against static ones"),
    "loadgen": Command("ops.loadgen", "send load to any OpenAI-compatible server and say what its users saw"),
    "gate-power": Command("ops.gate_power", "how often the gate errs, and what it finds, on recorded judgements"),
    "train-drafter": Command("ops.distill", "make a drafter by distillation from the target's own outputs"),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `redraft` script; always exits."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """The exit code of one command line. argparse's own refusals and --help leave by SystemExit."""
    name = next((word for word in argv if not word.startswith("-")), "")
    parser = _parser(name)
    arguments = parser.parse_args(argv)
    try:
        return int(importlib.import_module(COMMANDS[arguments.command].module).main(arguments) or 0)
    except RedraftError as error:
        print(f"redraft: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `redraft config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return PIPE_CLOSED


def _parser(chosen: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog="redraft",
        description="Serves a language model by speculative decoding, with a drafter that keeps learning.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"redraft {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.meaning,
            description=f"{command.meaning[0].upper()}{command.meaning[1:]}.",
            allow_abbrev=False,
            formatter_class=Help,
        )
        if name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def _leave(number: int, _: FrameType | None) -> NoReturn:
    # As an exception, so that every context manager on the way out does its work.
    raise SystemExit(128 + number)


def _version() -> str:
    try:
        return version("redraft")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"
