"""The prompt sets: enough of them, all different, and no split knows another's.

Held-out figures are honest only if no held-out prompt, template or subject was seen in training, and the demo's
warm-up only if it is new to the drafter.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest

from ops.prompt_file import parse_prompt_set
from ops.prompt_sets import FILLINGS, SPLITS, domains, expand, load_prompts, prompt_set, splits
from shared.errors import ConfigError

DISTILLED = ("chat", "code", "maths")
# What each split is for decides its size: hours of distillation, an interval on alpha, a demo that never repeats.
DISTINCT = {"train": 3_000, "held_out": 300, "demo": 500}
TEMPLATES = {"train": 150, "held_out": 40, "demo": 50}
WRITTEN = {"train": 60, "held_out": 40, "demo": 60}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("domain", DISTILLED)
def test_a_distilled_domain_has_enough_of_everything(domain: str, split: str) -> None:
    prompts = prompt_set(domain, split)
    assert len(prompts.templates) >= TEMPLATES[split]
    assert len(prompts.prompts) >= WRITTEN[split]
    assert len(load_prompts(domain, split)) >= DISTINCT[split]


def test_every_file_is_valid_and_its_prompts_are_distinct() -> None:
    for domain, split in ((d, s) for d in domains() for s in splits(d)):
        prompts = load_prompts(domain, split)
        assert len(set(prompts)) == len(prompts)
        assert all(prompt == prompt.strip() != "" for prompt in prompts)


@pytest.mark.parametrize("domain", domains())
def test_splits_share_no_template_and_no_prompt(domain: str) -> None:
    def fold(text: str) -> str:
        return " ".join(text.lower().split()).rstrip(".?!")

    for one, other in combinations(splits(domain), 2):
        ours, theirs = prompt_set(domain, one), prompt_set(domain, other)
        skeletons = [{fold("_".join(t.parts)) for t in s.templates} for s in (ours, theirs)]
        assert not skeletons[0] & skeletons[1]
        expanded = [{fold(p) for p in load_prompts(domain, split)} for split in (one, other)]
        assert not expanded[0] & expanded[1]


def test_chat_splits_share_no_subject() -> None:
    for one, other in combinations(SPLITS, 2):
        words = [
            {v for values in prompt_set("chat", split).slots.values() for v in values if not v.isdigit()}
            for split in (one, other)
        ]
        assert not words[0] & words[1]


@pytest.mark.parametrize("domain", DISTILLED)
def test_the_drift_domains_are_news_to_the_drafter(domain: str) -> None:
    prompts = load_prompts(domain, "train")
    assert not [p for p in prompts if re.search(r"\b(sql|database|german)", p.lower())]
    assert all(p.isascii() or domain == "maths" for p in prompts)  # maths has ², × and the like


def test_the_seed_alone_decides() -> None:
    first = load_prompts("chat", "train", count=300, seed=7)
    assert load_prompts("chat", "train", count=300, seed=7) == first
    assert set(load_prompts("chat", "train", count=300, seed=8)) != set(first)


def test_too_many_is_an_error_that_says_how_many_there_are() -> None:
    there = len(load_prompts("maths", "held_out"))
    with pytest.raises(ConfigError, match=rf"'maths', split 'held_out', which has {there}"):
        load_prompts("maths", "held_out", count=there + 1)


def test_an_unknown_domain_or_split_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'poetry'.*chat"):
        load_prompts("poetry", "train")
    with pytest.raises(ConfigError, match=r"'chat' has no split 'test'.*train"):
        load_prompts("chat", "test")


FILE = """
domain: toy
slots:
  few: [a, b]
  number: {range: [0, 1000, 1]}
templates:
  - "few {few}"
  - "one {number} and {number#2}"
  - "two {number} in {{braces}}"
prompts: ["written {as} it is"]
"""


def test_a_prefix_is_spread_evenly_until_a_template_has_no_more() -> None:
    everything = expand(parse_prompt_set(FILE, name="toy.train.yaml"))
    first_round, second_round = everything[:4], everything[4:7]
    assert sorted(p.split()[0] for p in first_round) == ["few", "one", "two", "written"]
    assert sorted(p.split()[0] for p in second_round) == ["few", "one", "two"]
    counts = Counter(p.split()[0] for p in everything)
    assert counts == {"written": 1, "few": 2, "one": FILLINGS, "two": FILLINGS}


def test_braces_and_repeated_slots() -> None:
    everything = expand(parse_prompt_set(FILE, name="toy.train.yaml"))
    assert "written {as} it is" in everything
    assert all(p.endswith("in {braces}") for p in everything if p.startswith("two"))
    pairs = [p.split()[1::2] for p in everything if p.startswith("one")]
    assert all(left != right for left, right in pairs)


def test_a_label_gives_every_ordered_pair_of_different_values() -> None:
    text = "domain: toy\nslots: {s: [x, y, z]}\ntemplates: ['{s} {s#b} {s}']"
    got = set(expand(parse_prompt_set(text, name="toy.train.yaml")))
    assert got == {"x y x", "x z x", "y x y", "y z y", "z x z", "z y z"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("domain: toy\ntemplates: ['{x}']", "templates[0]"),
        ("domain: toy\nslots: {x: [1]}\nprompts: [p]", "slots.x"),
        ("domain: toy\nprompts: [p, q, 'p ']", "prompts[2]"),
        ("domain: toy\ntemplates: [p]\nprompts: [p]", "prompts"),
        ("domain: toy\nslots: {x: [1]}\ntemplates: ['{x} {']", "templates[0]"),
        ("domain: toy\nslots: {x: [1]}\ntemplates: ['{x} {x#2}']", "templates[0]"),
        ("domain: toy\nslots: {x: [yes]}\ntemplates: ['{x}']", "slots.x"),
        ("domain: toy\nslots: {x: [a, a]}\ntemplates: ['{x}']", "slots.x"),
        ("domain: toy\nslots: {x: []}\ntemplates: ['{x}']", "slots.x"),
        ("domain: toy\nslots: {x: {range: [1]}}\ntemplates: ['{x}']", "slots.x"),
        ("domain: toy\nslots: {x: {range: [1, 5, 0]}}\ntemplates: ['{x}']", "slots.x"),
        ("domain: toy\nprompts: [3]", "prompts[0]"),
        ("domain: toy\nprompts: p", "prompts"),
        ("domain: other\nprompts: [p]", "domain"),
        ("domain: toy\nprompt: [p]", "prompt"),
        ("domain: toy", None),
        ("- p", None),
        ("domain: [", None),
    ],
)
def test_a_malformed_file_names_its_field(text: str, field: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_prompt_set(text, name="toy.train.yaml")
    assert caught.value.field == "toy.train.yaml" + (f":{field}" if field else "")
