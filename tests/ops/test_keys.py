"""`redraft keys`, and a stack that will not listen to the world without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops import cli
from shared.keys import read_keys
from shared.privacy import Policy


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    return tmp_path


def test_a_key_is_made_listed_and_revoked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["keys", "add", "web", "--scope", "inference", "--scope", "metrics", "--tenant", "acme"]) == 0
    secret = capsys.readouterr().out.strip()  # nothing else is on standard output
    key = read_keys(home / "keys.json").find(secret)
    assert key is not None
    assert (key.name, key.scopes, key.tenant) == ("web", ("inference", "metrics"), "acme")
    assert cli.run(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "web" in listed
    assert "acme" in listed
    assert secret not in listed
    assert cli.run(["keys", "revoke", "web"]) == 0
    assert read_keys(home / "keys.json").keys == ()
    assert cli.run(["keys", "revoke", "web"]) == cli.REFUSED


def test_another_file_may_be_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = home / "other" / "k.json"
    assert cli.run(["keys", "add", "a", "--set", f"serve.keys_file={place}"]) == 0
    assert read_keys(place).find(capsys.readouterr().out.strip()) is not None
    assert not (home / "keys.json").exists()


def test_up_refuses_the_world_without_keys_before_anything_starts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["up", "--host", "0.0.0.0"]) == cli.REFUSED
    said = capsys.readouterr().err
    assert "serve.host" in said
    assert "redraft keys add" in said
    assert list(home.iterdir()) == []
    assert cli.run(["up", "--host", "0.0.0.0", "--set", "serve.auth=off"]) == cli.REFUSED


def test_a_tenants_policy_is_set_changed_listed_and_taken_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["keys", "policy", "acme", "--traces", "off"]) == cli.REFUSED, "no keys, no tenants"
    assert cli.run(["keys", "add", "web", "--tenant", "acme"]) == 0
    assert cli.run(["keys", "policy", "acme"]) == cli.REFUSED
    assert cli.run(["keys", "policy", "acme", "--share", "2"]) == cli.REFUSED
    assert cli.run(["keys", "policy", "acme", "--share", "0.25", "--keep-s", "3600"]) == 0
    assert cli.run(["keys", "policy", "acme", "--traces", "off"]) == 0
    assert read_keys(home / "keys.json").policies == {"acme": Policy(traces=False, share=0.25, keep_s=3600.0)}
    capsys.readouterr()
    assert cli.run(["keys", "list"]) == 0
    assert "acme: nothing leaves the replica" in capsys.readouterr().out
    assert cli.run(["keys", "policy", "acme", "--default"]) == 0
    assert read_keys(home / "keys.json").policies == {}
