"""Traffic that a user brings: a JSONL file of requests, each with a domain.

Benchmark files are read as they are, with their ids and references ignored; what cannot be sent as a chat request
is an error that names file, line and field. Sends nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

_FORMS = ("prompt", "messages", "turns")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class TrafficRow:
    """One request. A row of several turns has them as user messages, in order."""

    domain: str
    messages: list[dict[str, str]]
    line: int  # in the file, from 1


def read_traffic(path: Path) -> list[TrafficRow]:
    """The requests of a JSONL file, in order; empty lines are skipped.

    A row has exactly one of `prompt` (text), `messages` (chat messages) and `turns` (the user's texts); its
    domain is `domain`, else `category`, else "traffic". Other keys are ignored. Raises ConfigError.
    """
    try:
        # Only \n ends a line: a JSON text may hold other separators unescaped.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", "Give a UTF-8 JSONL file.") from error
    rows = [_row(text, f"{path}:{line}", line) for line, text in enumerate(lines, start=1) if text.strip()]
    if not rows:
        raise ConfigError(str(path), "has no rows", "Give one JSON object a line.")
    return rows


def _row(text: str, where: str, line: int) -> TrafficRow:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(where, f"is not JSON ({error})", "Write one object a line.") from error
    if not isinstance(row, dict):
        raise ConfigError(where, "is not a JSON object", "Write one object a line.")
    given = [form for form in _FORMS if form in row]
    if len(given) != 1:
        problem = f"has {' and '.join(given)}" if given else f"has none of {', '.join(_FORMS)}"
        raise ConfigError(where, problem, "Give exactly one of them.")
    form = given[0]
    tag = next((key for key in ("domain", "category") if key in row), None)
    domain = row[tag] if tag else "traffic"
    if not isinstance(domain, str) or not domain.strip():
        raise ConfigError(f"{where}:{tag}", f"{domain!r} is not a name", "Give a text.")
    read = _messages if form == "messages" else _turns
    value = [row[form]] if form == "prompt" else row[form]
    return TrafficRow(domain, read(value, f"{where}:{form}"), line)


def _turns(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) and t.strip() for t in value):
        raise ConfigError(where, "is empty or not text", "Give text (turns: a list of texts).")
    return [{"role": "user", "content": turn} for turn in value]


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ConfigError(where, "is not a list of messages", "Give at least one message.")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigError(f"{where}[{i}]", "is not a message", "Give role and content, nothing else.")
        if message["role"] not in _ROLES:
            raise ConfigError(f"{where}[{i}].role", f"is {message['role']!r}", f"Use {', '.join(_ROLES)}.")
        if not isinstance(message["content"], str):
            raise ConfigError(f"{where}[{i}].content", "is not text", "Give text.")
    return [dict(message) for message in value]
