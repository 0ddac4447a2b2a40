"""Which JSON Schemas are compiled: those that cost no more than about a second of one core, and no stack.

The grammar library bounds little by itself: its time grows with the square of an object's properties and of its
patterns, and it calls itself along references until the process has no stack left. Each limit is near the largest
schema that was compiled in under a second on one core. A schema of everyday size is far from all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from shared.errors import RequestError

DEEPEST = 100  # objects and arrays within each other; the library reads no more than 128
MOST_SCHEMAS = 1_000  # objects and booleans: 1,000 properties take 0.6 s, 2,000 take 3; references cannot go deeper
MOST_ELEMENTS = 10_000  # of arrays, enums above all: 0.4 s
MOST_PATTERNS = 50  # of names: 0.1 s; 200 take 5
MOST_ITEMS, _ITEMS = 2_000, ("minItems", "maxItems", "minProperties", "maxProperties")  # ten thousand take ten seconds
MOST_LETTERS, _LETTERS = 100_000, ("minLength", "maxLength")
MOST_STEPS = 10_000  # product of all `multipleOf`, without their decimal point: a hundred thousand take four seconds
LONGEST, LONGEST_TEXT = 100_000, 10_000  # characters of the schema, and of one text in it


def require_modest(schema: Any, param: str) -> None:
    """Raises RequestError, with limit and remedy, for a schema that would cost more than any answer is worth."""
    for problem in _problems(schema):
        raise RequestError(f"'{param}' {problem}", param=param, code="schema_too_large")


def _problems(schema: Any) -> Iterator[str]:
    values = _values(schema)
    if values is None:
        yield f"is nested more than {DEEPEST} deep. Flatten it."
        return
    objects = [value for value in values if isinstance(value, dict)]
    schemas = len(objects) + sum(isinstance(value, bool) for value in values)
    elements = sum(len(value) for value in values if isinstance(value, list))
    patterns = sum(len(found) for each in objects if isinstance(found := each.get("patternProperties"), dict))
    texts = [*(value for value in values if isinstance(value, str)), *(name for each in objects for name in each)]
    if schemas > MOST_SCHEMAS:
        yield f"has {schemas:,} objects and booleans; the limit is {MOST_SCHEMAS:,}. Ask for less in one answer."
    if elements > MOST_ELEMENTS:
        yield f"has {elements:,} array elements; the limit is {MOST_ELEMENTS:,}. Shorten its enums."
    if patterns > MOST_PATTERNS:
        yield f"has {patterns} patternProperties; the limit is {MOST_PATTERNS}. Join them or name the properties."
    for most, names, what in ((MOST_ITEMS, _ITEMS, "items and properties"), (MOST_LETTERS, _LETTERS, "letters")):
        if sum(_count(each, names) for each in objects) > most:
            yield f"counts more than {most:,} {what} in all ({', '.join(names)}). Leave such bounds out."
    if math.prod(_steps(each.get("multipleOf")) for each in objects) > MOST_STEPS:
        yield f"has multipleOf whose product is above {MOST_STEPS:,}. Leave it out."
    if any(len(text) > LONGEST_TEXT for text in texts):
        yield f"has a text of more than {LONGEST_TEXT:,} characters. Shorten it."
    if len(json.dumps(schema, ensure_ascii=False)) > LONGEST:
        yield f"is longer than {LONGEST:,} characters. Leave out what only describes."


def _values(schema: Any) -> list[Any] | None:
    """The schema and everything in it; None where it is too deep."""
    found: list[Any] = []
    level = [schema]
    for _ in range(DEEPEST):
        found += level
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if not level:
            return found
    return None


def _count(schema: dict[str, Any], names: Sequence[str]) -> int:
    """Of whole numbers however long; what is no whole number is the grammar library's to refuse."""
    found: int = sum(schema[name] for name in names if isinstance(schema.get(name), int))
    return found


def _steps(value: Any) -> int:
    """A number without its decimal point: 0.25 is 25."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value or not math.isfinite(value):
        return 1
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int), "it is finite"
    written = "".join(map(str, digits)) + "0" * min(max(exponent, 0), len(str(MOST_STEPS)))
    return MOST_STEPS + 1 if len(written) > len(str(MOST_STEPS)) else int(written)
