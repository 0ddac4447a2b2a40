"""Counters add up, can be cut by their tags, and survive replicas that come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.counters import Counters, field_of, parse_field


def counted() -> Counters:
    counters = Counters()
    counters.add("accepted", 3, domain="sql", version="v1")
    counters.add("accepted", 4, domain="sql", version="v2")
    counters.add("accepted", 5, domain="chat", version="v1")
    counters.add("tested", 10, domain="sql", version="v1")
    counters.add("tested", 9, domain="chat", version="v1")
    counters.add("requests_finished")
    counters.add("requests_finished")
    counters.add("accepted_at.1", 7)
    return counters


def test_totals_by_any_cut() -> None:
    counters = counted()
    assert counters.total("accepted") == 12
    assert counters.total("accepted", domain="sql") == 7
    assert counters.total("accepted", version="v1") == 8
    assert counters.total("accepted", domain="sql", version="v1") == 3
    assert counters.total("accepted", domain="never") == counters.total("never") == 0
    assert counters.total("requests_finished") == 2
    assert counters.total("accepted_at.1") == 7
    assert counters.alpha_counts() == (12, 19)
    assert counters.alpha_counts(domain="sql", version="v1") == (3, 10)
    assert counters.tag_values("domain") == ["sql", "chat"]
    assert counters.tag_values("version") == ["v1", "v2"]


def test_fields_on_the_wire() -> None:
    assert field_of("steps") == "steps"
    assert field_of("steps", domain="d") == "steps|domain=d"
    assert field_of("steps", version="v") == "steps|version=v"
    assert parse_field("steps|domain=d|version=v") == ("steps", {"domain": "d", "version": "v"})


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
def test_no_tag_breaks_a_field(domain: str, version: str) -> None:
    """Whatever a client calls its domain, it comes back as one tag, and totals find it."""
    name, tags = parse_field(field_of("tested", domain, version))
    assert name == "tested"
    assert set(tags) == {"domain", "version"}
    counters = Counters()
    counters.add("tested", 2, domain=domain, version=version)
    assert counters.total("tested", domain=tags["domain"], version=tags["version"]) == 2
    assert counters.total("tested", domain=domain, version=version) == 2


def test_replicas_add_up() -> None:
    merged = Counters.merge([counted().fields, counted().fields, {"steps": 1.0}])
    assert merged.alpha_counts() == (24, 38)
    assert merged.total("steps") == 1
    assert Counters.merge([]).fields == {}


def test_a_window_is_the_difference_and_a_fresh_start_counts_from_nothing() -> None:
    older, newer = counted(), counted()
    newer.add("accepted", 6, domain="sql", version="v2")
    newer.add("tested", 8, domain="sql", version="v3")
    window = newer.minus(older)
    assert window.alpha_counts() == (6, 8)
    assert window.total("requests_finished") == 0


def test_a_copy_does_not_share() -> None:
    original = counted()
    copy = Counters(original.fields)
    copy.add("requests_finished", 5)
    assert original.total("requests_finished") == 2


@pytest.mark.parametrize("value", [0.25, 3])
def test_seconds_are_counters_too(value: float) -> None:
    counters = Counters()
    counters.add("verify_s", value)
    counters.add("verify_s", value)
    assert counters.total("verify_s") == 2 * value


def test_alpha_rows_are_pairs_of_which_something_was_tested() -> None:
    counters = Counters()
    for domain, version, accepted, tested in (("sql", "base", 1, 4), ("chat", "base", 2, 2), ("sql", "v1", 0, 0)):
        counters.add("accepted", accepted, domain=domain, version=version)
        counters.add("tested", tested, domain=domain, version=version)
    counters.add("emitted", 9, domain="german")
    assert counters.alpha_rows() == [
        {"domain": "sql", "version": "base", "accepted": 1, "tested": 4},
        {"domain": "chat", "version": "base", "accepted": 2, "tested": 2},
    ]
