"""A script for `test_stack`: `redraft up` with everything real but the model and the learner."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from ops import cli, stack
from ops.processes import Supervisor
from shared.config import Config
from tests.fakes import load_fake_replica


def serve_fake(supervisor: Supervisor, config: Config) -> None:
    from serving.app import deploy, shutdown

    supervisor.on_exit(shutdown)
    deploy(config, load=load_fake_replica)


def main() -> None:
    parts: Any = stack
    parts.Preparation = lambda config: SimpleNamespace(wait=lambda: None, stop=lambda: None)
    parts.start_serving = serve_fake
    parts.start_learner = lambda supervisor, config: None
    cli.main(["up", "--target", "fake", *sys.argv[1:]])


if __name__ == "__main__":
    main()
