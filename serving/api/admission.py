"""From a valid body to engine requests: token ids, limits, sampling parameters, grammar, tags.

Invariant: a request that leaves here has passed the engine's own check, so what can be refused is refused before an
answer begins. Defaults are OpenAI's: 16 tokens for a completion, the rest of the context for a chat answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.api.answers import PromptView
from serving.api.chat import encode_chat, encode_text
from serving.api.constraint import grammar_of
from serving.api.domains import DEFAULT, DOMAIN_PATTERN
from serving.api.schema import ChatCompletionRequest, CompletionRequest, Generation
from serving.api.service import Backend
from serving.engine.request import GenerationParams, GenerationRequest, Grammar
from shared.errors import RequestError
from shared.trace import Sampling

COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Admitted:
    """The engine requests of one HTTP request: for each prompt in turn, `candidates` of which `shown` are answered."""

    requests: tuple[GenerationRequest, ...]
    prompts: tuple[PromptView, ...]
    candidates: int
    shown: int
    blamed: str = ""  # the field that gave the grammar, where there is one


async def admit_completion(backend: Backend, body: CompletionRequest, id: str, tenant: str) -> Admitted:
    """Raises RequestError, Overloaded or NotReady."""
    prompts = await asyncio.to_thread(_prompts, backend, body)
    limit = body.max_tokens or COMPLETION_TOKENS
    logprobs = body.logprobs
    if logprobs is None and body.candidates > body.choices:
        logprobs = 0  # to choose by
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(of_prompt or 0, body.logprobs)
    params = _params(backend, body, limit, logprobs, of_prompt)
    return await _admit(backend, body, id, tenant, prompts, params, "prompt")


async def admit_chat(backend: Backend, body: ChatCompletionRequest, id: str, tenant: str) -> Admitted:
    """The conversation as one prompt. Raises RequestError, Overloaded or NotReady."""
    tools = body.tools if body.tools and body.calling else []
    ids = await asyncio.to_thread(encode_chat, backend.tokenizer, body.messages, tools)
    limit = body.max_completion_tokens or body.max_tokens or max(1, backend.context - len(ids))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(backend, body, limit, logprobs, body.prompt_logprobs)
    return await _admit(backend, body, id, tenant, [PromptView(tuple(ids))], params, "messages")


async def _admit(
    backend: Backend,
    body: Generation,
    id: str,
    tenant: str,
    prompts: Sequence[PromptView],
    params: tuple[GenerationParams, str],
    param: str,
) -> Admitted:
    if not prompts or not all(prompt.ids for prompt in prompts):
        raise RequestError("The prompt is empty. Give at least one token.", param=param, code="empty_prompt")
    _check_count(backend, body, len(prompts))
    domain, (common, blamed) = _domain(body.metadata or {}), params
    count = len(prompts) * body.candidates
    requests = [
        GenerationRequest(
            id=id if count == 1 else f"{id}-{index}",
            prompt_ids=prompts[index // body.candidates].ids,
            params=_of_choice(common, index % body.candidates),
            domain=domain,
            tenant=tenant,
        )
        for index in range(count)
    ]
    for request in requests[:: body.candidates]:  # candidates differ in their seeds only
        await _check(backend, request, param, blamed)
    placed = backend.domains.place(domain)  # only now: what is refused takes no place
    return Admitted(
        tuple(replace(request, domain=placed) for request in requests),
        tuple(prompts),
        body.candidates,
        body.choices,
        blamed,
    )


def _check_count(backend: Backend, body: Generation, prompts: int) -> None:
    if prompts * body.candidates <= backend.most_prompts:
        return
    if body.candidates == 1:
        said, param = f"'prompt' has {prompts} prompts", "prompt"
    else:
        param = "best_of" if body.candidates > body.choices else "n"
        said = f"'{param}' asks for {body.candidates} answers to {prompts} prompt" + ("s" if prompts > 1 else "")
    raise RequestError(
        f"{said}; this service takes at most {backend.most_prompts} answers in one request.", param=param
    )


async def _check(backend: Backend, request: GenerationRequest, param: str, blamed: str) -> None:
    """The engine's own check, in the names of this API."""
    try:
        if request.params.grammar is not None:  # compiling may take a moment
            await asyncio.to_thread(backend.decoder.check, request)
        else:
            backend.decoder.check(request)
    except RequestError as error:
        error.param = {"prompt": param, "response_format": blamed}.get(error.param or "", error.param)
        raise


def _params(
    backend: Backend, body: Generation, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> tuple[GenerationParams, str]:
    """(what all candidates share, the field to blame for the grammar)."""
    if (body.min_tokens or 0) > max_tokens:
        raise RequestError(
            f"'min_tokens' ({body.min_tokens}) is more than the {max_tokens} tokens that may come.", param="min_tokens"
        )
    bias = tuple((int(id), value) for id, value in (body.logit_bias or {}).items())
    _require_tokens(backend, (id for id, _ in bias), "logit_bias")
    _require_tokens(backend, body.stop_token_ids or (), "stop_token_ids")
    grammar, blamed = grammar_of(body)
    params = GenerationParams(
        sampling=_sampling(body, bias, grammar),
        seed=body.seed,
        max_tokens=max_tokens,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        speculative=body.speculative is not False,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        deadline_s=body.timeout,
        priority=body.priority or 0,
    )
    return params, blamed


def _sampling(body: Generation, bias: tuple[tuple[int, float], ...], grammar: Grammar | None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seeded=body.seed is not None,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=bias,
        constrained=grammar is not None or bool(body.min_tokens),
    )


def _of_choice(params: GenerationParams, index: int) -> GenerationParams:
    return params if params.seed is None or not index else replace(params, seed=seed_of(params.seed, index))


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's choice: the first has the request's own, each other one that follows from it."""
    if not index:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _prompts(backend: Backend, body: CompletionRequest) -> list[PromptView]:
    prompt, views, tokens = body.prompt, list[PromptView](), list[int]()
    for item in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(item, int):
            tokens.append(item)
        else:
            views.append(_view(backend, body, item))
    if tokens:
        views.append(_view(backend, body, tokens))
    return views


def _view(backend: Backend, body: CompletionRequest, prompt: str | list[int]) -> PromptView:
    tokenizer = backend.tokenizer
    if isinstance(prompt, str):
        # An empty text is empty even where the tokenizer would put special tokens around it.
        ids = encode_text(tokenizer, prompt) if prompt else []
        if not body.echo:
            return PromptView(tuple(ids))
        bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return PromptView(tuple(ids), prompt, hidden=max(0, len(ids) - len(bare)))
    _require_tokens(backend, prompt, "prompt")
    return PromptView(tuple(prompt), tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else "")


def _require_tokens(backend: Backend, ids: Iterable[int], param: str) -> None:
    if (most := max(ids, default=0)) >= backend.token_count:
        raise RequestError(
            f"'{param}' has token id {most}; this model's ids are below {backend.token_count}.", param=param
        )


def _domain(metadata: Mapping[str, str]) -> str:
    domain = metadata.get("domain", DEFAULT)
    if not re.fullmatch(DOMAIN_PATTERN, domain):
        raise RequestError(
            "'metadata.domain' must be 1 to 64 letters, digits, '_', '-' or '.'.", param="metadata.domain"
        )
    return domain
