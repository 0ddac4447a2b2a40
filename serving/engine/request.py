"""A request as accepted: prompt, parameters, tags. Immutable; what changes while it runs is in `sequence.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.trace import Sampling

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What the answer must be a sentence of. `text` is the schema as JSON, the regular expression or the grammar."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True)
class GenerationParams:
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None  # given: shared-noise coupling; None: rejection sampling
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculative: bool = True
    min_tokens: int = 0  # the end and stop ids are masked until so many tokens are there
    stop_token_ids: tuple[int, ...] = ()  # end the request as the end of the text does
    logprobs: int | None = None  # None: off; else that many alternatives beside each token's own
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None
    deadline_s: float | None = None  # from arrival; what has been said by then is the answer
    priority: int = 0  # higher goes first


@dataclass(frozen=True)
class GenerationRequest:
    id: str
    prompt_ids: tuple[int, ...]
    params: GenerationParams = field(default_factory=GenerationParams)
    domain: str = "default"
    tenant: str = "default"
