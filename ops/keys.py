"""`redraft keys`: makes, lists and revokes API keys, and sets what may be learnt from a tenant's requests.

A running stack follows within the next request.

A key is shown once, when it is made; what is kept is its hash (see `shared.keys`).
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ops import settings
from shared.config import Config
from shared.errors import ConfigError
from shared.keys import SCOPES, changed_keys, default_policy, read_keys
from shared.privacy import Policy


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
    policy = actions.add_parser(
        "policy",
        help="say what may be learnt from a tenant's requests",
        allow_abbrev=False,
        formatter_class=parser.formatter_class,
    )
    policy.add_argument("tenant", metavar="TENANT", help="whose requests")
    policy.add_argument(
        "--traces",
        choices=("on", "off"),
        help="off: nothing of its requests leaves the replica (default: as it is)",
    )
    policy.add_argument(
        "--share", type=float, metavar="X", help="share of its requests that is traced, 0 to 1 (default: as it is)"
    )
    policy.add_argument(
        "--keep-s",
        type=float,
        metavar="S",
        help="seconds that its traces are kept for; 0: no limit (default: as it is)",
    )
    policy.add_argument("--default", action="store_true", help="back to the configuration's policy (privacy.*)")
    for action in (add, listing, revoke, policy):
        settings.add_arguments(action)


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    {"add": _add, "list": _list, "revoke": _revoke, "policy": _policy}[arguments.action](arguments, config)
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
    console = Console(highlight=False)
    console.print(table if table.row_count else f"There are no keys in {config.keys_path}.")
    for tenant, policy in sorted(ring.policies.items()) if ring else ():
        console.print(f"{tenant}: {_said(policy)}")


def _revoke(arguments: Namespace, config: Config) -> None:
    with changed_keys(config.keys_path) as held:
        held[0] = held[0].without(arguments.name)
    print(f"{arguments.name} is revoked.")


def _policy(arguments: Namespace, config: Config) -> None:
    if not config.keys_path.exists():
        remedy = "Make a key first, or set privacy.traces, privacy.share and privacy.keep_s for everybody."
        raise ConfigError("serve.keys_file", f"{config.keys_path} does not exist, so there are no tenants", remedy)
    given = {
        "traces": None if arguments.traces is None else arguments.traces == "on",
        "share": arguments.share,
        "keep_s": arguments.keep_s,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if bool(changes) == arguments.default:
        raise ConfigError("policy", "say what to change, or --default alone", "Give --traces, --share or --keep-s.")
    with changed_keys(config.keys_path) as held:
        before = held[0].policies.get(arguments.tenant, default_policy(config))
        policy = None if arguments.default else replace(before, **changes)
        held[0] = held[0].with_policy(arguments.tenant, policy)
    print(f"{arguments.tenant}: {_said(policy or default_policy(config))}")


def _said(policy: Policy) -> str:
    if not policy.traces:
        return "nothing leaves the replica"
    kept = f"kept for {policy.keep_s:g} s" if policy.keep_s else "kept without a limit"
    return f"{policy.share:.0%} of the requests traced, {kept}"
