"""API keys at rest: the file that `redraft keys` writes and every replica reads, and who may do without one.

Invariant: a key itself is never stored, only its HMAC-SHA-256 under the file's own salt. A fast hash is enough because
every key is 256 random bits made here: there is no list of likely keys to try, and a slow hash would let anybody who
sends wrong keys keep the replica busy. Tenants' privacy policies stand beside the keys, since the keys make the tenants
and a change must count without a restart. It knows nothing of HTTP.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from shared.config import Config
from shared.errors import ConfigError
from shared.privacy import Policy, check_policy, read_policy

Scope = Literal["inference", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "rd-"  # so that a leaked key is recognised as what it is
NAME_PATTERN = r"[A-Za-z0-9_.\-]{1,64}"  # of keys and of tenants
_FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """Whoever holds the secret may do what `scopes` say, as `tenant`."""

    name: str
    digest: str  # hex
    scopes: tuple[str, ...]
    tenant: str
    created_at: float  # seconds since the epoch


@dataclass(frozen=True)
class Keyring:
    """All keys and policies of one file. Immutable: a change is a new ring."""

    salt: str = field(default_factory=lambda: secrets.token_hex(32))
    keys: tuple[Key, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)  # by tenant

    def find(self, secret: str) -> Key | None:
        """The key of this secret. Takes the same time whichever it is, and whether or not there is one."""
        digest, found = self._digest(secret), None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def with_new(self, name: str, scopes: Sequence[str], tenant: str) -> tuple[Keyring, str]:
        """(ring with one more key, its secret, which exists nowhere else). Raises ConfigError."""
        if any(key.name == name for key in self.keys):
            raise ConfigError("NAME", f"there is a key {name!r} already", "Revoke it first, or choose another name.")
        secret = PREFIX + secrets.token_urlsafe(32)
        key = Key(name, self._digest(secret), tuple(scopes), tenant, time.time())
        _check(key)
        return replace(self, keys=(*self.keys, key)), secret

    def without(self, name: str) -> Keyring:
        """Raises ConfigError if there is no such key."""
        kept = tuple(key for key in self.keys if key.name != name)
        if len(kept) == len(self.keys):
            known = ", ".join(key.name for key in self.keys) or "none"
            raise ConfigError("NAME", f"there is no key {name!r}", f"The keys are: {known}.")
        return replace(self, keys=kept)

    def with_policy(self, tenant: str, policy: Policy | None) -> Keyring:
        """None: the tenant has the configuration's. Raises ConfigError."""
        check_name("TENANT", tenant)
        others = {name: other for name, other in self.policies.items() if name != tenant}
        if policy is None:
            return replace(self, policies=others)
        check_policy(policy)
        return replace(self, policies={**others, tenant: policy})

    def _digest(self, secret: str) -> str:
        return hmac.new(bytes.fromhex(self.salt), secret.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def access_of(config: Config) -> Literal["keys", "open"]:
    """Whether requests need a key. Raises ConfigError where going without is not allowed."""
    serve, path = config.serve, config.keys_path
    remedy = "Make a key with `redraft keys add NAME --scope inference --tenant TENANT`."
    if serve.auth == "keys" or (serve.auth == "auto" and (serve.keys_file or path.exists())):
        if not path.exists():
            raise ConfigError("serve.keys_file", f"{path} does not exist", remedy)
        return "keys"
    if is_loopback(serve.host):
        return "open"
    if serve.auth == "off":
        problem = f"{serve.host} can be reached from other machines, and off would let anybody in"
        raise ConfigError("serve.auth", problem, f"Listen on 127.0.0.1. Or: {remedy}")
    problem = f"{serve.host} can be reached from other machines, and there are no API keys ({path})"
    raise ConfigError("serve.host", problem, f"{remedy} Or listen on 127.0.0.1.")


def default_policy(config: Config) -> Policy:
    """Of a tenant without one of its own."""
    return Policy(config.privacy.traces, config.privacy.share, config.privacy.keep_s)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: Path) -> Keyring:
    """Raises ConfigError naming the file for one that is no keys file."""
    try:
        return _ring_of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            "serve.keys_file", f"cannot read {path} ({error.strerror})", "Give a readable file."
        ) from error
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        remedy = "Put back what `redraft keys` wrote."
        raise ConfigError("serve.keys_file", f"{path} is no keys file ({error})", remedy) from error


@contextmanager
def changed_keys(path: Path) -> Iterator[list[Keyring]]:
    """The ring of `path` (a new one where there is no file) in a list; what stands there at the end is written.

    Holds a lock, so that two commands at once lose nothing; the file is replaced whole, readable for its owner only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = [read_keys(path) if path.exists() else Keyring()]
        yield held
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        tree = {
            "version": _FORMAT,
            "salt": held[0].salt,
            "keys": [asdict(key) for key in held[0].keys],
            "tenants": {tenant: policy.to_dict() for tenant, policy in held[0].policies.items()},
        }
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(tree, file, indent=2)
            file.write("\n")
        partial.replace(path)


class WatchedKeys:
    """The keys of a file as they are now: a change counts from the next request on, without a restart.

    A file that cannot be read keeps the last ring (a torn edit must not lock everybody out); a file that is gone lets
    nobody in, and keeps the policies for those who are in already.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is not there or is no keys file."""
        self._path, self._lock = path, threading.Lock()
        self._stamp = self._look()
        self._ring = read_keys(path)

    def find(self, secret: str) -> Key | None:
        """The key of this secret. Raises nothing."""
        self._follow()
        return self._ring.find(secret)

    def policy(self, tenant: str) -> Policy | None:
        """The tenant's own policy, if it has one. Raises nothing."""
        self._follow()
        return self._ring.policies.get(tenant)

    def _follow(self) -> None:
        with self._lock:
            if (stamp := self._look()) != self._stamp:
                self._stamp = stamp
                self._read_again()

    def _read_again(self) -> None:
        if self._stamp is None:
            log.error("%s is gone: no key counts until it is back", self._path)
            self._ring = Keyring(policies=self._ring.policies)
            return
        try:
            self._ring = read_keys(self._path)
            log.info("%s was read again: %d keys", self._path, len(self._ring.keys))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _ring_of(tree: Any) -> Keyring:
    # Files without `tenants` are of before there were policies.
    if not isinstance(tree, dict) or set(tree) - {"tenants"} != {"version", "salt", "keys"}:
        raise ValueError("not an object of version, salt, keys and tenants")
    if tree["version"] != _FORMAT:
        raise ValueError(f"version {tree['version']!r}; this release reads {_FORMAT}")
    bytes.fromhex(tree["salt"])
    names = {field.name for field in fields(Key)}
    keys = []
    for entry in tree["keys"]:
        if not isinstance(entry, dict) or set(entry) != names:
            raise ValueError(f"a key has other fields than {', '.join(sorted(names))}")
        key = Key(**(entry | {"scopes": tuple(entry["scopes"])}))
        _check(key)
        keys.append(key)
    ring = Keyring(tree["salt"], tuple(keys))
    for tenant, policy in dict(tree.get("tenants", {})).items():
        ring = ring.with_policy(tenant, read_policy(policy))
    return ring


def _check(key: Key) -> None:
    check_name("NAME", key.name)
    check_name("--tenant", key.tenant)
    if not key.scopes or not set(key.scopes) <= set(SCOPES):
        raise ConfigError("--scope", f"{list(key.scopes)} are no scopes", f"Scopes are {', '.join(SCOPES)}.")
    if not re.fullmatch("[0-9a-f]{64}", key.digest):
        raise ValueError(f"the digest of {key.name} is not 64 hex digits")


def check_name(field: str, name: Any) -> None:
    """Raises ConfigError unless it can be a key's or a tenant's."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(field, f"{name!r} is no name", "Use 1 to 64 letters, digits, '_', '-' or '.'.")
