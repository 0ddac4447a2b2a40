"""What is asked in a bench: conversations by domain, cut into the groups that are answered together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench_measure import Messages
from ops.prompt_sets import load_prompts
from ops.traffic_file import read_traffic
from shared.errors import ConfigError

_SPLIT = "held_out"


@dataclass(frozen=True)
class Cell:
    """Some conversations of one domain that are answered together, `batch` of them."""

    batch: int
    domain: str
    unit: int  # which of the domain's groups, from 0
    conversations: Sequence[Messages]


def built_in(domains: Sequence[str], count: int, seed: int) -> dict[str, list[Messages]]:
    """`count` held-out prompts of each shipped domain: the shipped head has not seen them."""
    return {domain: [_ask(text) for text in load_prompts(domain, _SPLIT, count=count, seed=seed)] for domain in domains}


def from_file(path: Path, count: int) -> dict[str, list[Messages]]:
    """The first `count` rows of each category of a JSONL file, such as Spec-Bench's question.jsonl.

    Of a row of several turns only the first is asked, since later ones would depend on each contender's own answers.
    """
    found: dict[str, list[Messages]] = {}
    for row in read_traffic(path):
        of_turns = len(row.messages) > 1 and all(message["role"] == "user" for message in row.messages)
        mine = found.setdefault(row.domain, [])
        if len(mine) < count:
            mine.append(row.messages[:1] if of_turns else row.messages)
    return found


def cells(conversations: Mapping[str, Sequence[Messages]], batches: Sequence[int], count: int) -> list[Cell]:
    """Every group that a repeat answers: `count` conversations of each domain, at least one group at each batch size.

    Raises ConfigError where a domain has too few for a batch.
    """
    found = []
    for batch in batches:
        for domain, all_ in conversations.items():
            if len(all_) < batch:
                problem = f"{domain} has {len(all_)} prompts, too few for a batch of {batch}"
                raise ConfigError("--batch", problem, "Lower --batch, or give more prompts.")
            for unit in range(max(min(count, len(all_)) // batch, 1)):
                found.append(Cell(batch, domain, unit, all_[unit * batch : (unit + 1) * batch]))
    return found


def _ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]
