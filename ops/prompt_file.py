"""The format of a prompt file: slots, templates and written prompts, validated strictly.

`{slot}` in a template is a value of that slot; `{slot#2}` is another value of the same slot, different from the
first; `{{` and `}}` are literal braces. Written prompts are taken as they are. An unknown or unused slot, a
repeated text or an unreadable value is an error that names file and field. Knows nothing of where files lie.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from shared.errors import ConfigError

_KEYS = ("domain", "slots", "templates", "prompts")
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)(#\w+)?\}|[{}]")


@dataclass(frozen=True)
class Template:
    """A text with holes: `parts` has one literal more than `fields`; a field is (slot, label)."""

    parts: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]

    def fill(self, chosen: dict[tuple[str, str], str]) -> str:
        """The text with each field replaced by its chosen value."""
        text = [self.parts[0]]
        for field, part in zip(self.fields, self.parts[1:], strict=True):
            text += [chosen[field], part]
        return "".join(text)


@dataclass(frozen=True)
class PromptSet:
    """One validated file."""

    domain: str
    slots: dict[str, tuple[str, ...]]
    templates: tuple[Template, ...]
    prompts: tuple[str, ...]


def parse_prompt_set(text: str, *, name: str) -> PromptSet:
    """Validate one YAML file; `name` is DOMAIN.SPLIT.yaml and heads every message. Raises ConfigError."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(name, f"is not YAML ({error})", "Mend the syntax.") from error
    if not isinstance(raw, dict):
        raise ConfigError(name, "is not a mapping", f"Use the keys {', '.join(_KEYS)}.")
    if unknown := [str(key) for key in raw if key not in _KEYS]:
        raise ConfigError(f"{name}:{unknown[0]}", "is not a known key", f"Use {', '.join(_KEYS)} only.")
    domain = name.split(".")[0]
    if raw.get("domain") != domain:
        raise ConfigError(f"{name}:domain", f"says {raw.get('domain')!r}", f"Write {domain}, as in the name.")
    slots = _slots(raw.get("slots") or {}, name)
    texts = _texts(raw.get("templates") or [], f"{name}:templates")
    prompts = _texts(raw.get("prompts") or [], f"{name}:prompts")
    if not texts and not prompts:
        raise ConfigError(name, "has neither templates nor prompts", "Add some.")
    templates = tuple(_template(t, slots, f"{name}:templates[{i}]") for i, t in enumerate(texts))
    if both := {t.parts[0] for t in templates if not t.fields}.intersection(prompts):
        raise ConfigError(f"{name}:prompts", f"{min(both)!r} is a template too", "Keep one of them.")
    if unused := set(slots) - {slot for t in templates for slot, _ in t.fields}:
        raise ConfigError(f"{name}:slots.{min(unused)}", "no template uses this slot", "Use it or remove it.")
    return PromptSet(domain, slots, templates, prompts)


def _texts(raw: Any, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ConfigError(where, "is not a list", "Write a list of texts.")
    seen: dict[str, None] = {}
    for i, text in enumerate(raw):
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}[{i}]", f"{text!r} is not a text", "Quote it.")
        if text.strip() in seen:
            raise ConfigError(f"{where}[{i}]", f"{text!r} is there twice", "Remove one.")
        seen[text.strip()] = None
    return tuple(seen)


def _slots(raw: Any, name: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}:slots", "is not a mapping", "Write slot names with their lists.")
    return {str(slot): _slot_values(values, f"{name}:slots.{slot}") for slot, values in raw.items()}


def _slot_values(raw: Any, where: str) -> tuple[str, ...]:
    if isinstance(raw, dict):
        bounds: Any = raw.get("range")
        integers = isinstance(bounds, list) and all(type(b) is int for b in bounds)
        if set(raw) != {"range"} or not integers or len(bounds) not in (2, 3) or 0 in bounds[2:]:
            raise ConfigError(where, f"{raw!r} is not a range", "Write {range: [start, stop, step]}.")
        raw = list(range(*bounds))
    if not isinstance(raw, list) or not raw:
        raise ConfigError(where, "has no values", "Write a list, or {range: [start, stop, step]}.")
    for value in raw:
        # YAML reads a bare yes, no, on and off as booleans: they must be quoted to be words.
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(where, f"{value!r} is neither text nor number", "Quote it.")
    values = tuple(str(value) for value in raw)
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ConfigError(where, f"{twice!r} is there twice", "Remove one.")
    return values


def _template(text: str, slots: dict[str, tuple[str, ...]], where: str) -> Template:
    parts, fields, end = [""], list[tuple[str, str]](), 0
    for match in _FIELD.finditer(text):
        parts[-1] += text[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            parts[-1] += match[0][0]
        elif match[1] is None:
            raise ConfigError(where, f"a lone {match[0]!r} in {text!r}", "Write {{ and }} for braces.")
        elif match[1] not in slots:
            raise ConfigError(where, f"slot {match[1]!r} is not defined", "Define it under slots.")
        else:
            fields.append((match[1], match[2] or ""))
            parts.append("")
    parts[-1] += text[end:]
    for slot in sorted({slot for slot, _ in fields}):
        if len({f for f in fields if f[0] == slot}) > len(slots[slot]):
            raise ConfigError(where, f"asks for more values of {slot!r} than it has", "Add values.")
    return Template(tuple(parts), tuple(fields))
