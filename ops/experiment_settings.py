"""The flags of `redraft experiment`, read into one frozen object before anything is computed."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.demo_files import require_writable
from ops.experiment_arms import ARMS, GROUPS, Arm, chosen_arms
from ops.settings import FLAGS, help_of, read_settings
from shared.config import Config
from shared.errors import ConfigError

RECORDS = 2000  # of a domain at scale 1
DOMAINS = "maths,sql,german,code"
LEAST_RECORDS = 8


@dataclass(frozen=True)
class ExperimentSettings:
    config: Config
    domains: tuple[str, ...]  # built-in ones, in order; empty with a traffic file
    traffic: Path | None
    records: int  # of a domain
    max_tokens: int
    batch: int
    arms: tuple[Arm, ...]
    passes: float  # of an offline drafter over its share of the data
    full_learning_rate: float
    served_per_s: float  # tokens
    learnt_per_s: float
    look_back: int  # records a domain
    jobs: int
    seed: int
    data: Path
    png: Path
    json: Path | None

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown = {name: value for name, value in plain.items() if name not in ("config", "png", "json", "data")}
        return {
            **shown,
            "traffic": str(self.traffic) if self.traffic else None,
            "arms": [arm.name for arm in self.arms],
            "config": self.config.to_dict(),
        }


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; see `redraft config`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration; repeatable"
    )
    parser.add_argument("--target", metavar="X", help=help_of("target"))
    parser.add_argument(
        "--drafter", metavar="X", help="head that every arm starts from (drafter.model; default: the shipped one)"
    )
    what = parser.add_argument_group("the traffic")
    what.add_argument(
        "--scale", type=float, default=1.0, metavar="S", help=f"of {RECORDS} records a domain (default: %(default)g)"
    )
    what.add_argument(
        "--domains", default=DOMAINS, metavar="A,B", help="built-in ones, in order (default: %(default)s)"
    )
    what.add_argument("--traffic", type=Path, metavar="FILE", help="JSONL of your own in place of built-in prompts")
    what.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    what.add_argument("--batch", type=int, default=64, metavar="N", help="answered together (default: %(default)s)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and training (default: %(default)s)")
    who = parser.add_argument_group("the arms")
    who.add_argument(
        "--arms", default=",".join(ARMS), metavar="A,B", help=f"of {', '.join([*ARMS, *GROUPS])} (default: all)"
    )
    who.add_argument(
        "--passes",
        type=float,
        default=3.0,
        metavar="N",
        help="of an offline drafter over its data (default: %(default)g)",
    )
    who.add_argument(
        "--full-learning-rate", type=float, default=5e-4, metavar="R", help="of online-full (default: %(default)g)"
    )
    who.add_argument(
        "--served-per-s", type=float, default=70.0, metavar="N", help="tokens in simulated time (default: %(default)g)"
    )
    who.add_argument(
        "--learnt-per-s", type=float, default=250.0, metavar="N", help="tokens in simulated time (default: %(default)g)"
    )
    who.add_argument(
        "--look-back", type=int, default=32, metavar="N", help="records a domain for forgetting (default: %(default)s)"
    )
    how = parser.add_argument_group("the run")
    how.add_argument("--data", type=Path, metavar="FOLDER", help="traffic, finished arms (default: <home>/experiment)")
    how.add_argument("--jobs", type=int, default=0, metavar="N", help="arms at once (default: cores / learner.threads)")
    how.add_argument("--png", type=Path, default=Path("experiment.png"), metavar="FILE", help="figure (%(default)s)")
    how.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


def read_arguments(arguments: Namespace) -> ExperimentSettings:
    """Raises ConfigError naming the flag, and before anything is loaded."""
    for flag in ("--png", "--json"):
        require_writable(flag, getattr(arguments, flag[2:]))
    config = _config(arguments)
    records = round(RECORDS * arguments.scale)
    if records < LEAST_RECORDS:
        least = f"Give {LEAST_RECORDS / RECORDS:g} or more: {LEAST_RECORDS} records a domain."
        raise ConfigError("--scale", f"{arguments.scale:g} leaves {records} records a domain", least)
    return ExperimentSettings(
        config=config,
        domains=() if arguments.traffic else _domains(arguments.domains),
        traffic=arguments.traffic,
        records=records,
        max_tokens=_at_least("--max-tokens", arguments.max_tokens, 2),
        batch=_at_least("--batch", arguments.batch, 1),
        arms=chosen_arms(arguments.arms),
        passes=_positive("--passes", arguments.passes),
        full_learning_rate=_positive("--full-learning-rate", arguments.full_learning_rate),
        served_per_s=_positive("--served-per-s", arguments.served_per_s),
        learnt_per_s=_positive("--learnt-per-s", arguments.learnt_per_s),
        look_back=_at_least("--look-back", arguments.look_back, 2),
        jobs=_at_least("--jobs", arguments.jobs, 0) or max((os.cpu_count() or 1) // config.learner.threads, 1),
        seed=arguments.seed,
        data=arguments.data or config.home_path / "experiment",
        png=arguments.png,
        json=arguments.json,
    )


def _config(arguments: Namespace) -> Config:
    absent = dict.fromkeys(FLAGS)
    given = {name: getattr(arguments, name) for name in ("config", "set", "target", "drafter")}
    return read_settings(Namespace(**{**absent, **given, "no_learn": False})).config


def _domains(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(found) < 2 or len(set(found)) != len(found):
        raise ConfigError("--domains", f"{text!r} is no drift", "Name two or more different ones, with commas.")
    return found


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(flag, f"{value} is too small", f"Give {least} or more.")
    return value


def _positive(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(flag, f"{value} is out of range", "Give a number above 0.")
    return value
