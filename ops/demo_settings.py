"""The demo's settings: a person's own, and what a run needs to begin from nothing.

Each run starts with the base drafter, and must neither find nor disturb what a real installation has learnt. So it
lives in a home of its own, `<home>/demo`, emptied at the start; only converted models are shared with the real one.
"""

from __future__ import annotations

import shutil
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from ops import settings
from ops.run_file import owned_home
from ops.settings import Settings
from shared.config import Config, RedisConfig

# No drafter makes so many times the tokens a second, so the base drafter goes on serving whatever is learnt.
_NEVER = 100.0
_SHARED = ("models", "fingerprints")


def demo_settings(arguments: Namespace) -> Settings:
    """Raises ConfigError naming the wrong key, variable or flag."""
    # In the control the learner runs as always: it measures, and costs the cores what it costs otherwise.
    chosen = settings.read_settings(Namespace(**{**vars(arguments), "no_learn": False}))
    config, sources = chosen.config, dict(chosen.sources)
    if arguments.no_learn:
        config = replace(config, gate=replace(config.gate, min_gain=_NEVER))
        sources["gate.min_gain"] = "--no-learn"
    if config.redis.url and sources["redis.prefix"] == "default":  # that server may hold another installation
        config = replace(config, redis=replace(config.redis, prefix=f"{config.redis.prefix}-demo-{time.time_ns():x}"))
    if sources["mlflow.tracking_uri"] != "--set":  # nor may its registered champion be found, or moved
        config = replace(config, mlflow=replace(config.mlflow, tracking_uri=""))
    # The demo sends its own traffic to its own stack, which no other machine can reach: it needs no key.
    config = replace(config, serve=replace(config.serve, auth="off", keys_file=""))
    return Settings(replace(config, home=str(config.home_path / "demo")), sources)


def status_command(config: Config) -> str:
    """What shows this stack from another terminal."""
    prefix = config.redis.prefix
    prefixed = "" if prefix == RedisConfig().prefix else f"REDRAFT_REDIS_PREFIX={prefix} "
    return f"REDRAFT_HOME={config.home} {prefixed}redraft status"


def empty_home(home: Path) -> None:
    """Removes what the last run left. Raises ConfigError while another run is using it."""
    with owned_home(home):
        for entry in home.iterdir():
            if entry.name == "run" or entry.is_symlink():
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for name in _SHARED:
            real, link = home.parent / name, home / name
            real.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(real, target_is_directory=True)
