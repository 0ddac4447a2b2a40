"""From a command's flags to a Config that remembers where each value came from.

Each flag is one key of the configuration; `--set KEY=VALUE` reaches the others. Precedence is the Config's own:
defaults, file, environment, command line.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import Config, config_keys, load_config, values_of_environ, values_of_file, variable_of
from shared.errors import ConfigError

# Flag -> key; the flag's value is read as YAML would be.
FLAGS = {
    "target": ("target.model", "model to serve: the built-in one, a folder or a hub name"),
    "drafter": ("drafter.model", "drafter: default, none, a folder or a hub name"),
    "device": ("target.device", "auto, cpu, cuda or cuda:N"),
    "dtype": ("target.dtype", "weight format: auto, fp16, int8, fp32 or bf16"),
    "gamma": ("drafter.gamma", "tokens drafted a step: auto or a number; 0 decodes plainly"),
    "replicas": ("serve.replicas", "number of replicas"),
    "host": ("serve.host", "address to listen on"),
    "port": ("serve.port", "port to listen on; 0 takes any free one"),
}


@dataclass(frozen=True)
class Settings:
    """`sources` says for every key: default, the file, the variable or the flag that decided it."""

    config: Config
    sources: Mapping[str, str]

    @property
    def named(self) -> frozenset[str]:
        """Keys that a person set."""
        return frozenset(key for key, source in self.sources.items() if source != "default")


def add_arguments(
    parser: ArgumentParser, *, no_learn: str = "serve without the learner (learner.enabled=false)"
) -> None:
    """`no_learn` says what --no-learn means to a command that gives it a meaning of its own."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; see `redraft config`")
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", metavar="X", help=help_of(flag))
    parser.add_argument("--no-learn", action="store_true", help=no_learn)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration; repeatable"
    )


def help_of(flag: str) -> str:
    """What the flag means, its key, and the default that holds where nothing else sets that."""
    key, meaning = FLAGS[flag]
    section, _, name = key.partition(".")
    return f"{meaning} ({key}; default: {getattr(getattr(Config(), section), name)})"


def read_settings(arguments: Namespace, *, environ: Mapping[str, str] | None = None) -> Settings:
    """Raises ConfigError naming the key, variable or flag that is wrong."""
    environ = os.environ if environ is None else environ
    overrides, flags = _overrides(arguments)
    config = load_config(arguments.config, environ=environ, overrides=overrides)
    sources = dict.fromkeys(config_keys(), "default")
    if arguments.config is not None:
        sources.update(dict.fromkeys(values_of_file(arguments.config), str(arguments.config)))
    sources.update({key: variable_of(key) for key in values_of_environ(environ)})
    sources.update(flags)
    return Settings(config, sources)


def _overrides(arguments: Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """(key -> value, key -> the flag that set it); `--set` comes last and wins."""
    values: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for flag, (key, _) in FLAGS.items():
        value = getattr(arguments, flag)
        if value is None:
            continue
        if (flag, value) == ("drafter", "none"):  # not a model's name: serve without a drafter
            key = "drafter.kind"
        values[key], flags[key] = value, f"--{flag}"
    if arguments.no_learn:
        values["learner.enabled"], flags["learner.enabled"] = False, "--no-learn"
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("--set", f"{text!r} has no =", "Write --set engine.max_batch=8.")
        values[key.strip()], flags[key.strip()] = value.strip(), "--set"
    return values, flags
