"""Prompts for distilling the drafter and for the demo: the shipped sets, expanded.

A template is filled with combinations of its slots' values. The prompts of a split are distinct, their order is
decided by the seed alone, and they are spread evenly over the templates. `read_traffic`, for files that a user
brings in place of these sets, is reached from here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from random import Random

from ops.prompt_file import PromptSet, Template, parse_prompt_set
from ops.traffic_file import TrafficRow, read_traffic
from shared.errors import ConfigError

__all__ = [
    "FILLINGS",
    "SPLITS",
    "TrafficRow",
    "domains",
    "expand",
    "load_prompts",
    "prompt_set",
    "read_traffic",
    "splits",
]

SPLITS = ("train", "held_out", "demo")
FILLINGS = 64  # at most so many prompts from one template, so that none outweighs the others
_ENUMERABLE = 20_000  # up to so many combinations are listed and shuffled; beyond, drawn without repetition


def domains() -> list[str]:
    """The domains that ship, sorted. A domain need not have every split: drift domains are never trained on."""
    return sorted({domain for domain, _ in _shipped()})


def splits(domain: str) -> list[str]:
    """The splits that a domain has, in the order of SPLITS."""
    return [split for split in SPLITS if (domain, split) in _shipped()]


def load_prompts(domain: str, split: str, *, count: int | None = None, seed: int = 0) -> list[str]:
    """Distinct prompts of a domain's split, shuffled by `seed`; all of them without a `count`.

    Raises ConfigError for an unknown domain or split, a malformed file, or more prompts than there are.
    """
    prompts = expand(prompt_set(domain, split), seed=seed)
    if count is None:
        count = len(prompts)
    if not 0 <= count <= len(prompts):
        problem = f"{count} prompts asked of domain {domain!r}, split {split!r}, which has {len(prompts)}"
        raise ConfigError("count", problem, f"Ask for 0 to {len(prompts)}, or add templates.")
    prompts = prompts[:count]
    Random(f"{domain}/{split}/{seed}").shuffle(prompts)  # the even spread ends with the cut
    return prompts


def expand(prompts: PromptSet, *, seed: int = 0) -> list[str]:
    """Every prompt of a set, at most FILLINGS from one template, so that each prefix is spread evenly.

    Round by round, one more prompt from each template; the written prompts are part of the first round.
    """
    root = f"{prompts.domain}/{seed}"
    sources = [_fillings(t, prompts.slots, Random(f"{root}/{i}")) for i, t in enumerate(prompts.templates)]
    order = Random(f"{root}/order")
    expanded: dict[str, None] = {}
    for number in range(FILLINGS):
        texts = [] if number else list(prompts.prompts)
        texts += [text for source in sources if (text := next(source, None)) is not None]
        order.shuffle(texts)
        expanded.update(dict.fromkeys(texts))
    return list(expanded)


@lru_cache(maxsize=32)
def prompt_set(domain: str, split: str) -> PromptSet:
    """The validated file of a domain and split. Raises ConfigError."""
    if domain not in domains():
        raise ConfigError("domain", f"no prompt set is called {domain!r}", f"Choose from {', '.join(domains())}.")
    if split not in splits(domain):
        remedy = f"Choose from {', '.join(splits(domain))}."
        raise ConfigError("split", f"domain {domain!r} has no split {split!r}", remedy)
    resource = files("ops.prompts").joinpath(f"{domain}.{split}.yaml")
    return parse_prompt_set(resource.read_text(encoding="utf-8"), name=resource.name)


def _shipped() -> set[tuple[str, str]]:
    names = [entry.name.split(".") for entry in files("ops.prompts").iterdir()]
    return {(name[0], name[1]) for name in names if len(name) == 3 and name[1] in SPLITS and name[2] == "yaml"}


def _fillings(template: Template, slots: dict[str, tuple[str, ...]], random: Random) -> Iterator[str]:
    """A template's fillings in random order; two fields of one slot never have the same value."""
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
    """The numbers below `total` in random order, without a list of them when it would be long."""
    if total <= _ENUMERABLE:
        yield from random.sample(range(total), total)
        return
    seen: set[int] = set()
    while len(seen) < total:
        index = random.randrange(total)
        if index not in seen:
            seen.add(index)
            yield index
