"""The target's own answers, with its distributions and features: the data that a base drafter is distilled from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ops.corpus import Corpus
from ops.prompt_sets import load_prompts
from serving.batch import BatchRunner
from serving.engine.engine import Limits, Tracing
from serving.engine.request import GenerationParams, GenerationRequest
from serving.spec.gamma import GammaController
from shared.models.eagle3 import default_feature_layers
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel
from shared.trace import Sampling, TraceRecord

_TOPK = 64
_GREEDY = Sampling(temperature=0.0)
# The rest of the answers is sampled, so that the head also sees text that is not the likeliest.
_SAMPLED = Sampling(temperature=0.8, top_p=0.95)
_GREEDY_SHARE = 0.6


@dataclass(frozen=True)
class DataSettings:
    """What is generated."""

    domains: tuple[str, ...]
    split: str
    prompts: int  # a domain
    max_tokens: int
    batch: int
    seed: int
    greedy_only: bool = False
    answers: int = 0  # of all domains together; 0: one for every prompt


def chat_ids(target: LoadedModel, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Messages as the chat endpoint would put them to the target."""
    text = target.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return tuple(target.tokenizer.encode(str(text), add_special_tokens=False))


def requests_for(target: LoadedModel, settings: DataSettings) -> list[GenerationRequest]:
    """Domains take turns, so that every part of the list is a fair mix. Ids name the prompt, so a resume skips it."""
    lists = [
        [
            (domain, prompt)
            for prompt in load_prompts(domain, settings.split, count=settings.prompts, seed=settings.seed)
        ]
        for domain in settings.domains
    ]
    requests = []
    for domain, prompt in (item for item in chain.from_iterable(zip_longest(*lists)) if item is not None):
        name = hashlib.sha256(f"{settings.seed}:{domain}:{prompt}".encode()).hexdigest()[:16]
        greedy = settings.greedy_only or int(name[:8], 16) / 16**8 < _GREEDY_SHARE
        params = GenerationParams(
            sampling=_GREEDY if greedy else _SAMPLED,
            seed=None if greedy else int(name, 16) >> 1,
            max_tokens=settings.max_tokens,
        )
        messages = [{"role": "user", "content": prompt}]
        requests.append(GenerationRequest(name, chat_ids(target, messages), params, domain))
    return requests[: settings.answers or None]


def generate(
    target: LoadedModel,
    requests: Sequence[GenerationRequest],
    corpus: Corpus,
    *,
    batch: int,
    layers: Sequence[int] = (),  # whose outputs are kept; empty: those that a new head reads
) -> None:
    """Answer whatever the corpus does not hold yet."""
    todo = [request for request in requests if request.id not in corpus.ids]
    if not todo:
        return
    longest = max(len(request.prompt_ids) + request.params.max_tokens for request in todo)
    blocks = batch * -(-(longest + 1) // 16) + 1
    layers = layers or default_feature_layers(target.model.config.num_hidden_layers)
    paged = PagedModel(target, PagedKV(blocks, 16), layers)

    def keep(record: TraceRecord, features: Tensor | None) -> None:
        if features is not None:
            corpus.append(record, features)

    tracing = Tracing(keep, "distill", _TOPK, 1.0, lambda _request: True)
    limits = Limits(max_context=longest + 1, max_batch=batch, prefill_tokens=512)
    runner = BatchRunner(paged, None, GammaController(fixed=0, most=0, exploration=0), limits, tracing)
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=len(requests), completed=len(requests) - len(todo), tokens=0)
        tokens = 0
        for answer in runner.run(todo):
            tokens += answer.ending.completion_tokens
            progress.update(bar, advance=1, tokens=tokens)
