"""`redraft keys`: makes, lists and revokes API keys. A running stack follows within the next request.

A key is shown once, when it is made; what is kept is its hash (see `shared.keys`).
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace

from rich.console import Console
from rich.table import Table

from ops import settings
from shared.config import Config
from shared.keys import SCOPES, changed_keys, read_keys


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="make a key and print it", allow_abbrev=False, formatter_class=parser.formatter_class
    )
    add.add_argument("name", metavar="NAME", help="what you call the key")
    add.add_argument(
        "--scope", action="append", choices=SCOPES, help="what it is good for; repeatable (default: inference)"
    )
    add.add_argument("--tenant", default="default", metavar="T", help="whose requests these are")
    listing = actions.add_parser(
        "list",
        help="show every key's name, scopes and tenant",
        allow_abbrev=False,
        formatter_class=parser.formatter_class,
    )
    revoke = actions.add_parser("revoke", help="end a key", allow_abbrev=False, formatter_class=parser.formatter_class)
    revoke.add_argument("name", metavar="NAME", help="what you called the key")
    for action in (add, listing, revoke):
        settings.add_arguments(action)


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    {"add": _add, "list": _list, "revoke": _revoke}[arguments.action](arguments, config)
    return 0


def _add(arguments: Namespace, config: Config) -> None:
    with changed_keys(config.keys_path) as held:
        held[0], secret = held[0].with_new(arguments.name, arguments.scope or ["inference"], arguments.tenant)
    print(secret)  # alone on standard output, so that it can be piped
    print(
        f"This is the only time that the key is shown. Its hash is in {config.keys_path}.\n"
        "A stack that was started without a keys file needs a restart to ask for keys.",
        file=sys.stderr,
    )


def _list(arguments: Namespace, config: Config) -> None:
    table = Table("name", "scopes", "tenant", "made")
    ring = read_keys(config.keys_path) if config.keys_path.exists() else None
    for key in ring.keys if ring else ():
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        table.add_row(key.name, ", ".join(key.scopes), key.tenant, made)
    Console(highlight=False).print(table if table.row_count else f"There are no keys in {config.keys_path}.")


def _revoke(arguments: Namespace, config: Config) -> None:
    with changed_keys(config.keys_path) as held:
        held[0] = held[0].without(arguments.name)
    print(f"{arguments.name} is revoked.")
