"""API keys at rest, the file that holds them, and who may do without."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config, config_from_flat
from shared.errors import ConfigError
from shared.keys import PREFIX, Keyring, WatchedKeys, access_of, changed_keys, is_loopback, read_keys


def add(path: Path, name: str, tenant: str = "acme", scopes: tuple[str, ...] = ("inference",)) -> str:
    with changed_keys(path) as held:
        held[0], secret = held[0].with_new(name, scopes, tenant)
    return secret


def config(home: Path, **serve: Any) -> Config:
    return config_from_flat({"home": str(home)} | {f"serve.{name}": value for name, value in serve.items()})


def test_a_key_is_found_by_its_secret_and_by_nothing_else() -> None:
    ring, first = Keyring().with_new("a", ["inference"], "acme")
    ring, second = ring.with_new("b", ["admin", "metrics"], "ops")
    found = ring.find(second)
    assert found is not None
    assert (found.name, found.scopes, found.tenant) == ("b", ("admin", "metrics"), "ops")
    for wrong in ("", PREFIX, first[:-1], first + "x", second.upper(), "\udcff", found.digest):
        assert ring.find(wrong) is None
    assert len(first) >= len(PREFIX) + 43  # 256 bits in base64


def test_the_file_does_not_hold_the_secret_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"
    secret = add(path, "a")
    assert secret not in path.read_text()
    assert secret.removeprefix(PREFIX) not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert read_keys(path).find(secret) is not None


def test_two_files_hash_one_secret_differently() -> None:
    ring, secret = Keyring().with_new("a", ["inference"], "acme")
    other = Keyring(keys=ring.keys)  # the same digests under another salt
    assert other.find(secret) is None


def test_every_attempt_is_compared_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, first = Keyring().with_new("a", ["inference"], "acme")
    for name in "bcd":
        ring, _ = ring.with_new(name, ["inference"], "acme")
    compared: list[str] = []

    def compare(left: str, right: str) -> bool:
        compared.append(right)
        return left == right

    monkeypatch.setattr("shared.keys.hmac.compare_digest", compare)
    ring.find(first)
    assert compared == [key.digest for key in ring.keys]  # no early way out


def test_names_are_unique_and_revoking_ends_one_key() -> None:
    ring, first = Keyring().with_new("a", ["inference"], "acme")
    ring, second = ring.with_new("b", ["inference"], "acme")
    with pytest.raises(ConfigError, match="there is a key 'a' already"):
        ring.with_new("a", ["inference"], "acme")
    left = ring.without("a")
    assert left.find(first) is None
    assert left.find(second) is not None
    with pytest.raises(ConfigError, match="The keys are: b"):
        left.without("a")


@pytest.mark.parametrize(("name", "scopes", "tenant"), [("", ["admin"], "t"), ("a", [], "t"), ("a", ["root"], "t")])
def test_a_key_that_makes_no_sense_is_refused(name: str, scopes: list[str], tenant: str) -> None:
    with pytest.raises(ConfigError):
        Keyring().with_new(name, scopes, tenant)
    with pytest.raises(ConfigError, match="--tenant"):
        Keyring().with_new("a", ["admin"], "two words")


def test_commands_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [threading.Thread(target=add, args=(path, f"k{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(path).keys) == [f"k{number}" for number in range(8)]


def test_a_change_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add(path, "a")
    watched = WatchedKeys(path)
    assert watched.find(first) is not None
    second = add(path, "b")
    assert watched.find(second) is not None
    with changed_keys(path) as held:
        held[0] = held[0].without("a")
    assert watched.find(first) is None
    assert watched.find(second) is not None


def test_a_torn_file_keeps_the_keys_and_a_missing_one_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = add(path, "a")
    whole, watched = path.read_text(), WatchedKeys(path)
    path.write_text(whole[: len(whole) // 2])
    assert watched.find(secret) is not None
    path.unlink()
    assert watched.find(secret) is None
    path.write_text(whole)
    assert watched.find(secret) is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tree: tree | {"version": 2},
        lambda tree: tree | {"salt": "xyz"},
        lambda tree: tree | {"more": 1},
        lambda tree: tree | {"keys": [tree["keys"][0] | {"scopes": ["root"]}]},
        lambda tree: tree | {"keys": [tree["keys"][0] | {"digest": "secret in plain"}]},
        lambda tree: tree | {"keys": ["a"]},
        lambda tree: [tree],
    ],
)
def test_what_is_no_keys_file_is_an_error_that_names_it(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "keys.json"
    add(path, "a")
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match=r"serve\.keys_file.*keys\.json"):
        read_keys(path)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example")),
    ],
)
def test_without_keys_only_this_machine_may_ask(tmp_path: Path, host: str, local: bool) -> None:
    assert is_loopback(host) == local
    for auth in ("auto", "off"):
        asked = config(tmp_path, host=host, auth=auth)
        if local:
            assert access_of(asked) == "open"
        else:
            with pytest.raises(ConfigError, match="redraft keys add"):
                access_of(asked)


def test_keys_are_asked_for_where_there_are_some(tmp_path: Path) -> None:
    asked = config(tmp_path, host="0.0.0.0")
    add(asked.keys_path, "a")
    assert access_of(asked) == "keys"
    assert access_of(replace(asked, serve=replace(asked.serve, host="127.0.0.1"))) == "keys"
    assert access_of(config(tmp_path, auth="off")) == "open"  # said so, and on loopback
    with pytest.raises(ConfigError, match=r"serve\.auth"):
        access_of(config(tmp_path, auth="off", host="0.0.0.0"))


@pytest.mark.parametrize("serve", [{"auth": "keys"}, {"keys_file": "/nowhere/keys.json"}])
def test_a_keys_file_that_was_asked_for_must_be_there(tmp_path: Path, serve: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"serve\.keys_file.*does not exist"):
        access_of(config(tmp_path, **serve))


def test_off_may_be_written_as_yaml_reads_it(tmp_path: Path) -> None:
    assert config(tmp_path, auth=False).serve.auth == "off"
    with pytest.raises(ConfigError, match=r"serve\.auth"):
        config(tmp_path, auth=True)
