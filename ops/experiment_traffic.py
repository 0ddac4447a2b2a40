"""The traffic of an experiment: domain after domain, answered once by the target, on disk with its features.

Each domain has the records of the stream, and as many others with prompts of the same kind that are kept apart: what
offline drafters learn from, and what online ones are looked back on with. No record is both. An answer is named by all
that it depends on, so a folder may hold the traffic of several experiments, and a killed run is taken up again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.base import Base
from learner.example import Example
from ops.corpus import Corpus
from ops.distill_data import chat_ids, generate
from ops.experiment_settings import LEAST_RECORDS, ExperimentSettings
from ops.prompt_sets import expand, load_prompts, prompt_set
from ops.traffic_file import read_traffic
from serving.engine.request import GenerationParams, GenerationRequest
from shared.errors import ConfigError
from shared.models.target import load_model
from shared.trace import Sampling

_SPLIT = "demo"  # prompts that share no template with what the shipped head has learnt from
Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    id: str  # of its record
    domain: str
    messages: Sequence[Message]


@dataclass(frozen=True)
class DomainPrompts:
    name: str
    stream: tuple[Prompt, ...]
    apart: tuple[Prompt, ...]


@dataclass(frozen=True)
class DomainTraffic:
    name: str
    stream: tuple[str, ...]  # record ids, in order
    apart: tuple[str, ...]
    tokens: tuple[int, ...]  # generated, of each record of the stream
    apart_tokens: int


@dataclass(frozen=True)
class Traffic:
    """What was generated; the records themselves are read with `load`."""

    domains: tuple[DomainTraffic, ...]
    sha256: str  # over prompts and answers, in order

    @property
    def tokens(self) -> list[int]:
        return [tokens for domain in self.domains for tokens in domain.tokens]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Traffic:
        domains = tuple(
            DomainTraffic(
                name=part["name"],
                stream=tuple(part["stream"]),
                apart=tuple(part["apart"]),
                tokens=tuple(part["tokens"]),
                apart_tokens=part["apart_tokens"],
            )
            for part in tree["domains"]
        )
        return cls(domains, tree["sha256"])


def prompts_of(settings: ExperimentSettings, base: Base) -> list[DomainPrompts]:
    """Raises ConfigError when a domain has too few."""
    texts = _of_file(settings) if settings.traffic else _built_in(settings)
    found = []
    for name, conversations in texts.items():
        named = {}
        for messages in conversations:
            prompt = Prompt(_name(settings, base, name, messages), name, messages)
            named[prompt.id] = prompt  # a prompt that comes twice is sent once
        prompts = list(named.values())
        count = min(settings.records, len(prompts) // 2) if settings.traffic else settings.records
        if count < LEAST_RECORDS:
            remedy = f"Give {2 * LEAST_RECORDS} or more, half of which are kept apart, or leave {name} out."
            raise ConfigError("--traffic", f"has {len(prompts)} different prompts of {name}", remedy)
        found.append(DomainPrompts(name, *_split(prompts, count, whole=settings.traffic is None)))
    return found


def prepare(settings: ExperimentSettings, base: Base) -> Traffic:
    """Answers what the folder does not hold yet, and writes the manifest. Loads the target only if it must."""
    prompts = prompts_of(settings, base)
    corpus = Corpus(settings.data / "traffic")
    everything = [prompt for domain in prompts for prompt in (*domain.stream, *domain.apart)]
    if any(prompt.id not in corpus.ids for prompt in everything):
        target = settings.config.target
        loaded = load_model(target.model, home=settings.config.home_path, device=target.device, weights=target.dtype)
        params = GenerationParams(Sampling(temperature=0.0), max_tokens=settings.max_tokens, speculative=False)
        requests = [GenerationRequest(p.id, chat_ids(loaded, p.messages), params, p.domain) for p in everything]
        generate(loaded, requests, corpus, batch=settings.batch, layers=base.feature_layers)
    traffic = _described(prompts, corpus)
    manifest = {
        "target": base.target,
        "feature_layers": list(base.feature_layers),
        "max_tokens": settings.max_tokens,
        "temperature": 0.0,
        "seed": settings.seed,
        "source": str(settings.traffic) if settings.traffic else f"built-in prompts, split {_SPLIT}",
        **traffic.to_dict(),
    }
    (settings.data / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return traffic


def load(folder: Path, ids: Sequence[str]) -> list[Example]:
    """In the order of `ids`; features are views of the mapped file."""
    corpus = Corpus(folder / "traffic")
    corpus.only = set(ids)
    found = {record.id: Example(record, features) for record, features in corpus}
    return [found[id] for id in ids]


def _described(prompts: Sequence[DomainPrompts], corpus: Corpus) -> Traffic:
    corpus.only = {prompt.id for domain in prompts for prompt in (*domain.stream, *domain.apart)}
    records = {record.id: record for record, _ in corpus}
    digest = hashlib.sha256()
    domains = []
    for domain in prompts:
        for prompt in (*domain.stream, *domain.apart):
            record = records[prompt.id]
            digest.update(record.prompt_ids.tobytes() + record.output_ids.tobytes())
        domains.append(
            DomainTraffic(
                name=domain.name,
                stream=tuple(prompt.id for prompt in domain.stream),
                apart=tuple(prompt.id for prompt in domain.apart),
                tokens=tuple(len(records[prompt.id].output_ids) for prompt in domain.stream),
                apart_tokens=sum(len(records[prompt.id].output_ids) for prompt in domain.apart),
            )
        )
    return Traffic(tuple(domains), digest.hexdigest())


def _built_in(settings: ExperimentSettings) -> dict[str, list[list[Message]]]:
    found = {}
    for domain in settings.domains:
        there = len(expand(prompt_set(domain, _SPLIT), seed=settings.seed))
        most = there * 2 // 3
        if settings.records > most:
            problem = f"{settings.records} records of {domain}, which has {there} prompts, leave too few to keep apart"
            raise ConfigError("--scale", problem, f"At most {most} records can be had.")
        texts = load_prompts(domain, _SPLIT, count=min(2 * settings.records, there), seed=settings.seed)
        found[domain] = [[{"role": "user", "content": text}] for text in texts]
    return found


def _of_file(settings: ExperimentSettings) -> dict[str, list[list[Message]]]:
    """By domain, in the order in which domains come first."""
    assert settings.traffic is not None
    found: dict[str, list[list[Message]]] = {}
    for row in read_traffic(settings.traffic):
        found.setdefault(row.domain, []).append(row.messages)
    if len(found) < 2:
        raise ConfigError("--traffic", "has one domain, which is no drift", "Give rows a `domain`, of two or more.")
    return found


def _split(prompts: list[Prompt], count: int, *, whole: bool) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Stream and apart. The built-in prompts are shuffled; a file's rows take turns, since their order may matter."""
    if whole:
        return tuple(prompts[:count]), tuple(prompts[count:])
    return tuple(prompts[0 : 2 * count : 2]), tuple(prompts[1 : 2 * count : 2])


def _name(settings: ExperimentSettings, base: Base, domain: str, messages: Sequence[Message]) -> str:
    depends = [base.target, list(base.feature_layers), settings.max_tokens, domain, list(messages)]
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
