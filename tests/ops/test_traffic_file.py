"""A user's traffic file is read whole or refused with the file, line and field that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.prompt_sets import read_traffic
from shared.errors import ConfigError


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    return tmp_path / "traffic.jsonl"


def test_the_three_forms(traffic: Path) -> None:
    traffic.write_text(
        '{"prompt": "p", "domain": "maths", "reference": "8"}\n'
        "\n"
        '{"question_id": 3, "category": "writing", "turns": ["one", "two\u2028more"]}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n',
        encoding="utf-8",
    )
    plain, turns, chat = read_traffic(traffic)
    assert (plain.domain, plain.messages, plain.line) == ("maths", [{"role": "user", "content": "p"}], 1)
    assert (turns.domain, turns.line) == ("writing", 3)
    assert turns.messages == [{"role": "user", "content": text} for text in ("one", "two\u2028more")]
    assert (chat.domain, [m["role"] for m in chat.messages]) == ("traffic", ["system", "user"])


def test_domain_goes_before_category(traffic: Path) -> None:
    traffic.write_text('{"prompt": "p", "domain": "maths", "category": "writing"}')
    assert read_traffic(traffic)[0].domain == "maths"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("{", ""),
        ("[1]", ""),
        ('{"question": "q"}', ""),
        ('{"prompt": "p", "turns": ["t"]}', ""),
        ('{"prompt": " "}', ":prompt"),
        ('{"prompt": ["p"]}', ":prompt"),
        ('{"turns": []}', ":turns"),
        ('{"turns": "t"}', ":turns"),
        ('{"turns": ["t", 1]}', ":turns"),
        ('{"messages": []}', ":messages"),
        ('{"messages": ["m"]}', ":messages[0]"),
        ('{"messages": [{"role": "user", "content": "u", "name": "n"}]}', ":messages[0]"),
        ('{"messages": [{"role": "tool", "content": "u"}]}', ":messages[0].role"),
        ('{"messages": [{"role": "user", "content": null}]}', ":messages[0].content"),
        ('{"prompt": "p", "domain": 3}', ":domain"),
        ('{"prompt": "p", "category": ""}', ":category"),
    ],
)
def test_a_bad_row_names_file_line_and_field(traffic: Path, row: str, field: str) -> None:
    traffic.write_text('{"prompt": "fine"}\n' + row + "\n")
    with pytest.raises(ConfigError) as caught:
        read_traffic(traffic)
    assert caught.value.field == f"{traffic}:2{field}"


def test_a_missing_or_empty_file_is_named(traffic: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traffic(traffic)
    traffic.write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        read_traffic(traffic)
