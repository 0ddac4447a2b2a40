"""`redraft up`: the local stack in the foreground, until Ctrl-C; Redis and MLflow are started again if they die."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from rich.console import Console

from ops import settings
from ops.stack import Stack
from shared.config import Config


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)


def main(arguments: Namespace) -> int:
    chosen = settings.read_settings(arguments)
    console = Console(highlight=False)
    console.print("Starting (Ctrl-C stops everything) …")
    with Stack(chosen.config, named=chosen.named, say=lambda text: console.print(f"  {text}")) as stack:
        console.print(
            f"Serving at [bold]{stack.urls.api}/v1[/bold]\n"
            f"  try    curl {stack.urls.api}/v1/models\n"
            f"  MLflow {stack.urls.mlflow}\n"
            f"  Redis  {stack.urls.redis}\n"
            f"  keys   {_who_may_ask(stack.access, chosen.config)}\n"
            f"  watch  {stack.urls.api}/dashboard, or redraft status"
        )
        while True:
            time.sleep(1)
            for name in stack.tend():
                console.print(f"{name} had ended and was started again")


def _who_may_ask(access: str, config: Config) -> str:
    if access == "keys":
        return f"asked for; {config.keys_path} (`redraft keys list`)"
    return "off: everybody on this machine may ask (`redraft keys add NAME` makes the first one)"
