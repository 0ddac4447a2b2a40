"""Prompts for distilling the drafter and for the demo, and traffic files that a user brings.

`load_prompts` expands the shipped sets (ops/prompts/DOMAIN.SPLIT.yaml) into distinct prompts, in an order
that only the seed decides, spread evenly over the templates. `read_traffic` reads a JSONL file of requests.
Both are strict: what cannot be used is an error that names the file and the field.

Template syntax: `{slot}` is a value of that slot; `{slot#2}` is another value of the same slot, different
from the first; `{{` and `}}` are literal braces. Written prompts are taken as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import yaml

from shared.errors import ConfigError

SPLITS = ("train", "held_out", "demo")
FILLINGS = 64  # at most so many prompts from one template, so that none outweighs the others
_ENUMERABLE = 20_000  # up to so many combinations are listed and shuffled; beyond, drawn without repetition
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


@dataclass(frozen=True)
class TrafficRow:
    """One request of a traffic file. A row of several turns has them as user messages, in order."""

    domain: str
    messages: list[dict[str, str]]
    line: int  # in the file, from 1


def domains() -> list[str]:
    """The domains that ship, sorted."""
    names = (entry.name for entry in files("ops.prompts").iterdir() if entry.name.endswith(".yaml"))
    return sorted({name.split(".")[0] for name in names})


def load_prompts(domain: str, split: str, *, count: int | None = None, seed: int = 0) -> list[str]:
    """Distinct prompts of a domain's split, shuffled by `seed`; all of them without a `count`.

    Every template gives at most FILLINGS prompts; a smaller `count` takes equally from each as far as it can.
    Raises ConfigError for an unknown domain or split, a malformed file, or more prompts than there are.
    """
    prompts = [text for turn in _rounds(prompt_set(domain, split), seed) for text in turn]
    prompts = list(dict.fromkeys(prompts))
    if count is not None:
        if not 0 <= count <= len(prompts):
            problem = f"{count} prompts asked of domain {domain!r}, split {split!r}, which has {len(prompts)}"
            raise ConfigError("count", problem, f"Ask for 0 to {len(prompts)}, or add templates.")
        prompts = prompts[:count]
    Random(f"{domain}/{split}/{seed}").shuffle(prompts)
    return prompts


@lru_cache(maxsize=32)
def prompt_set(domain: str, split: str) -> PromptSet:
    """The validated file of a domain and split."""
    if domain not in domains():
        raise ConfigError(
            "domain", f"no prompt set is called {domain!r}", f"Choose from {', '.join(domains())}."
        )
    resource = files("ops.prompts").joinpath(f"{domain}.{split}.yaml")
    if split not in SPLITS or not resource.is_file():
        problem = f"domain {domain!r} has no split {split!r}"
        raise ConfigError("split", problem, f"Splits are {', '.join(SPLITS)}.")
    return parse_prompt_set(resource.read_text(encoding="utf-8"), name=resource.name)


def parse_prompt_set(text: str, *, name: str) -> PromptSet:
    """Validate one YAML file; `name` is DOMAIN.SPLIT.yaml and heads every message."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(name, f"is not YAML ({error})", "Mend the syntax.") from error
    keys = {"domain", "slots", "templates", "prompts"}
    if not isinstance(raw, dict) or not set(raw) <= keys:
        raise ConfigError(name, "has keys that are not known", f"Use {', '.join(sorted(keys))} only.")
    if raw.get("domain") != name.split(".")[0]:
        raise ConfigError(
            f"{name}:domain", f"says {raw.get('domain')!r}", "Write the domain of the file's name."
        )
    slots = _slots(raw.get("slots") or {}, name)
    texts = _texts(raw.get("templates") or [], f"{name}:templates")
    prompts = _texts(raw.get("prompts") or [], f"{name}:prompts")
    if not texts and not prompts:
        raise ConfigError(name, "has neither templates nor prompts", "Add some.")
    templates = tuple(_template(t, slots, f"{name}:templates[{i}]") for i, t in enumerate(texts))
    literal = {t.parts[0] for t in templates if not t.fields}
    both = literal.intersection(prompts)
    if both:
        raise ConfigError(f"{name}:prompts", f"{both.pop()!r} is a template too", "Keep one of them.")
    unused = set(slots) - {slot for t in templates for slot, _ in t.fields}
    if unused:
        raise ConfigError(f"{name}:slots.{min(unused)}", "no template uses this slot", "Use it or remove it.")
    return PromptSet(raw["domain"], slots, templates, prompts)


def read_traffic(path: Path) -> list[TrafficRow]:
    """The requests of a JSONL file, in order.

    A row has exactly one of `prompt` (text), `messages` (chat messages) and `turns` (the user's texts); its
    domain is `domain`, else `category`, else "traffic". Other keys (ids, references) are ignored.
    Raises ConfigError naming file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON text may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", "Give a UTF-8 JSONL file.") from error
    rows = [_traffic_row(text, f"{path}:{n}", n) for n, text in enumerate(lines, start=1) if text.strip()]
    if not rows:
        raise ConfigError(str(path), "has no rows", "Give one JSON object a line.")
    return rows


def _texts(raw: Any, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ConfigError(where, "is not a list", "Write a list of texts.")
    seen: set[str] = set()
    for i, text in enumerate(raw):
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}[{i}]", f"{text!r} is not a text", "Quote it.")
        if text.strip() in seen:
            raise ConfigError(f"{where}[{i}]", f"{text!r} is there twice", "Remove one.")
        seen.add(text.strip())
    return tuple(text.strip() for text in raw)


def _slots(raw: Any, name: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}:slots", "is not a mapping", "Write slot names with their lists.")
    return {str(slot): _slot_values(values, f"{name}:slots.{slot}") for slot, values in raw.items()}


def _slot_values(raw: Any, where: str) -> tuple[str, ...]:
    if isinstance(raw, dict):
        bounds: Any = raw.get("range")
        integers = isinstance(bounds, list) and all(type(b) is int for b in bounds)
        if set(raw) != {"range"} or not integers or len(bounds) not in (2, 3) or 0 in bounds[2:]:
            raise ConfigError(
                where, f"{raw!r} is not a range", "Write {range: [start, stop, step]} in integers."
            )
        raw = list(range(*bounds))
    if not isinstance(raw, list) or not raw:
        raise ConfigError(where, "has no values", "Write a list, or {range: [start, stop, step]}.")
    for value in raw:
        # YAML reads a bare yes, no, on and off as booleans: they must be quoted to be words.
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(where, f"{value!r} is neither text nor number", "Quote it.")
    values = tuple(str(value) for value in raw)
    if len(set(values)) < len(values):
        raise ConfigError(where, "has a value twice", "Remove one.")
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
    for slot in {slot for slot, _ in fields}:
        if len({f for f in fields if f[0] == slot}) > len(slots[slot]):
            raise ConfigError(where, f"asks for more values of {slot!r} than it has", "Add values.")
    return Template(tuple(parts), tuple(fields))


def _rounds(prompts: PromptSet, seed: int) -> Iterator[list[str]]:
    """Round by round, one more prompt from each template; the first round has the written prompts too."""
    root = f"{prompts.domain}/{seed}"
    sources = [_fillings(t, prompts.slots, Random(f"{root}/{i}")) for i, t in enumerate(prompts.templates)]
    order = Random(f"{root}/order")
    for round_ in range(FILLINGS):
        turn = [] if round_ else list(prompts.prompts)
        turn += [text for source in sources if (text := next(source, None)) is not None]
        order.shuffle(turn)
        yield turn


def _fillings(template: Template, slots: dict[str, tuple[str, ...]], random: Random) -> Iterator[str]:
    """A template's distinct fillings in random order."""
    names = list(dict.fromkeys(template.fields))
    values = [slots[slot] for slot, _ in names]
    for index in _permutation(math.prod(map(len, values)), random):
        chosen: dict[tuple[str, str], str] = {}
        for name, options in zip(names, values, strict=True):
            index, digit = divmod(index, len(options))
            chosen[name] = options[digit]
        if len({(slot, value) for (slot, _), value in chosen.items()}) == len(chosen):
            yield template.fill(chosen)


def _permutation(total: int, random: Random) -> Iterator[int]:
    if total <= _ENUMERABLE:
        listed = list(range(total))
        random.shuffle(listed)
        yield from listed
        return
    seen: set[int] = set()
    while len(seen) < total:
        index = random.randrange(total)
        if index not in seen:
            seen.add(index)
            yield index


def _traffic_row(text: str, where: str, line: int) -> TrafficRow:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(where, f"is not JSON ({error})", "Write one object a line.") from error
    if not isinstance(row, dict):
        raise ConfigError(where, "is not a JSON object", "Write one object a line.")
    given = [key for key in ("prompt", "messages", "turns") if key in row]
    if len(given) != 1:
        problem = f"has {' and '.join(given)}" if given else "has neither prompt, messages nor turns"
        raise ConfigError(where, problem, "Give exactly one of the three.")
    domain = row.get("domain", row.get("category", "traffic"))
    if not isinstance(domain, str) or not domain:
        raise ConfigError(f"{where}:domain", f"{domain!r} is not a name", "Give a text.")
    field = f"{where}:{given[0]}"
    return TrafficRow(domain, _messages(given[0], row[given[0]], field), line)


def _messages(key: str, value: Any, where: str) -> list[dict[str, str]]:
    if key == "messages":
        if not isinstance(value, list) or not value or not all(map(_is_message, value)):
            raise ConfigError(
                where, "is not a list of messages", "Give objects with role and content only, as text."
            )
        return [dict(message) for message in value]
    turns: Sequence[Any] = [value] if key == "prompt" else value
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ConfigError(
            where, f"{value!r} is not usable", "Give text that is not empty (turns: a list of it)."
        )
    return [{"role": "user", "content": turn} for turn in turns]


def _is_message(raw: Any) -> bool:
    return (
        isinstance(raw, dict)
        and set(raw) == {"role", "content"}
        and raw["role"] in ("system", "user", "assistant")
        and isinstance(raw["content"], str)
    )
