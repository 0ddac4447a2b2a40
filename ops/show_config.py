"""`redraft config`: the effective configuration as YAML that `--config` takes, each value with its source."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import yaml

from ops import settings

_COMMENT_COLUMN = 48


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)


def main(arguments: Namespace) -> int:
    print(render(settings.read_settings(arguments)), end="")
    return 0


def render(chosen: settings.Settings) -> str:
    """YAML; a comment behind each value names its source."""
    lines = []
    for section, values in chosen.config.to_dict().items():
        if isinstance(values, dict):
            lines.append(f"{section}:")
            lines.extend(
                _line(f"  {name}", value, chosen.sources[f"{section}.{name}"]) for name, value in values.items()
            )
        else:
            lines.append(_line(section, values, chosen.sources[section]))
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, source: str) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
    return f"{name}: {text}".ljust(_COMMENT_COLUMN) + f" # {source}"
