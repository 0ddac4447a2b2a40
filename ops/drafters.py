"""`redraft drafters`: the versions of a drafter, and which of them serves. Looks, and gives the learner its orders.

Orders go through Redis, so that this works wherever Redis can be reached, on Kubernetes too. Without a running stack,
what can be answered is answered from the learner's shelf on this machine's disk.
"""

from __future__ import annotations

import getpass
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ops import settings
from ops.drafter_sources import OnDisk, Running, open_source
from shared.errors import ConfigError

_SHOWN_FIRST = ("state", "number", "parent", "alpha_before", "alpha_after", "speedup", "reason", "watch")
_VERSION = "its name, as `redraft drafters list` shows it"


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, meaning: str) -> ArgumentParser:
        made = actions.add_parser(name, help=meaning, allow_abbrev=False)
        settings.add_arguments(made)
        return made

    action("list", "every version on the shelf").add_argument("--json", action="store_true", help="print one JSON list")
    action("show", "all that is known of a version").add_argument("version", metavar="VERSION", help=_VERSION)
    diff = action("diff", "what differs between two versions: facts, settings and weights")
    for side in ("before", "after"):
        diff.add_argument(side, metavar="VERSION", help=_VERSION)
    promote = action("promote", "make a version from the shelf, `base`, or an exported folder the one that serves")
    promote.add_argument("version", metavar="VERSION|FOLDER", help=f"{_VERSION}, or what `export` wrote")
    rollback = action("rollback", "take the canary back, or return to the version before the champion")
    pin = action("pin", "the champion stays until it is unpinned; attempts go on")
    unpin = action("unpin", "let the learner promote again")
    for order in (promote, rollback, pin, unpin):
        order.add_argument("--reason", default="", metavar="TEXT", help="is recorded with the order (default: none)")
    export = action("export", "write a version's adapter and manifest into a folder")
    export.add_argument("version", metavar="VERSION", help=_VERSION)
    export.add_argument("folder", type=Path, metavar="FOLDER", help="is made where it is not there")


def main(arguments: Namespace) -> int:
    source = open_source(settings.read_settings(arguments).config)
    try:
        looks = {"list": _list, "show": _show, "diff": _diff, "export": _export}
        if arguments.action in looks:
            looks[arguments.action](arguments, source)
        else:
            _order(arguments, source)
    finally:
        source.close()
    return 0


def _list(arguments: Namespace, source: Running | OnDisk) -> None:
    versions = source.versions()
    if arguments.json:
        print(json.dumps(versions, indent=2, ensure_ascii=False))
        return
    table = Table("version", "no.", "parent", "α before", "α after", "tokens/s", "state", "why")
    for facts in versions:
        table.add_row(
            facts["version"],
            str(facts["number"]),
            str(facts.get("parent", "")),
            *(_number(facts.get(name), ".3f") for name in ("alpha_before", "alpha_after")),
            _number(facts.get("speedup"), "+.1%"),
            facts["state"],
            str(facts.get("watch") or facts.get("reason", "")),
        )
    Console(highlight=False).print(table)


def _show(arguments: Namespace, source: Running | OnDisk) -> None:
    facts = _facts(source, arguments.version)
    table = Table("", "", show_header=False)
    for name in [*(name for name in _SHOWN_FIRST if name in facts), *sorted(facts.keys() - set(_SHOWN_FIRST))]:
        table.add_row(name, _text(facts[name]))
    Console(highlight=False).print(table)


def _diff(arguments: Namespace, source: Running | OnDisk) -> None:
    from ops.drafter_diff import weight_changes

    names = arguments.before, arguments.after
    before, after = (_facts(source, name) for name in names)
    table = Table("", *names)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            table.add_row(name, _text(before.get(name, "")), _text(after.get(name, "")))
    weights = Table("linear", f"change, as a share of {names[0]}'s own")
    for name, change in weight_changes(*(source.artifact(name) for name in names)):
        weights.add_row(name, f"{change:.3f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(weights)


def _export(arguments: Namespace, source: Running | OnDisk) -> None:
    from shared.artifact import save_folder

    artifact = source.artifact(arguments.version)
    if artifact is None:
        raise ConfigError("version", "the base is no adapter", "It is what drafter.model names.")
    save_folder(artifact, arguments.folder)
    print(f"{arguments.version} is in {arguments.folder}")


def _order(arguments: Namespace, source: Running | OnDisk) -> None:
    if isinstance(source, OnDisk):
        raise ConfigError("redis.url", "no stack runs that could follow", "Start it, or name its Redis.")
    reason = f"{arguments.reason or 'no reason given'} ({getpass.getuser()})"
    if arguments.action == "promote":
        folder = Path(arguments.version)
        pointer = (
            source.force(folder, reason)
            if folder.is_dir()
            else source.order("promote", version=arguments.version, reason=reason)
        )
    else:
        pointer = source.order(arguments.action, reason=reason)
    serving = source.champion()
    print(f"{serving} serves" + (f"; {pointer['version']} is on a canary" if pointer["version"] != serving else ""))


def _facts(source: Running | OnDisk, version: str) -> dict[str, Any]:
    for facts in source.versions():
        if facts["version"] == version:
            return facts
    raise ConfigError("version", f"{version} is not on the shelf", "`redraft drafters list` shows what is.")


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
