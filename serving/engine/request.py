"""A request as accepted: prompt, parameters, tags. Immutable; what changes while it runs is in `sequence.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import RequestError
from shared.privacy import DEFAULT_TENANT
from shared.trace import Sampling

MOST_LOGPROBS = 20
LEAST_REPETITION = 0.01  # logits are divided by it: far below, they leave float32's range, and nan is no distribution
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
    tenant: str = DEFAULT_TENANT


def check_params(params: GenerationParams, token_count: int) -> None:
    """Raises RequestError, naming the field, for values that no engine could honour."""
    sampling = params.sampling
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
            raise RequestError(f"'{name}' is {asked}; give 0 to {MOST_LOGPROBS} alternatives.", param=name)
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise RequestError(
            f"'min_tokens' is {params.min_tokens}; give 0 to max_tokens, which is {params.max_tokens}.",
            param="min_tokens",
        )
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [id for id, _ in sampling.logit_bias])):
        bad = next((token for token in ids if not 0 <= token < token_count), None)
        if bad is not None:
            message = f"'{name}' has token id {bad}; this model's ids are 0 to {token_count - 1}."
            raise RequestError(message, param=name)
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise RequestError("'logit_bias' names a token twice.", param="logit_bias")
    if not all(math.isfinite(amount) for _, amount in sampling.logit_bias):
        raise RequestError("'logit_bias' holds a value that is not finite.", param="logit_bias")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        amount = getattr(sampling, name)
        if not math.isfinite(amount) or (name == "repetition_penalty" and amount < LEAST_REPETITION):
            wanted = f"at least {LEAST_REPETITION}" if name == "repetition_penalty" else "a finite number"
            raise RequestError(f"'{name}' is {amount}; give {wanted}.", param=name)
    if params.deadline_s is not None and not 0 < params.deadline_s < math.inf:
        raise RequestError(f"the deadline is {params.deadline_s} s; give a positive number.", param="deadline_s")
