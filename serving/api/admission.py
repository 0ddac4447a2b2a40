"""From a valid body to engine requests: token ids, limits, sampling parameters, tags.

Invariant: a request that leaves here has passed the engine's own check, so what can be refused is refused before an
answer begins. Defaults are OpenAI's: 16 tokens for a completion, the rest of the context for a chat answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from serving.api.chat import encode_chat, encode_text
from serving.api.schema import DOMAIN_PATTERN, ChatCompletionRequest, CompletionRequest
from serving.api.service import Backend
from serving.engine.request import GenerationParams, GenerationRequest
from shared.errors import RequestError
from shared.trace import Sampling

COMPLETION_TOKENS = 16


async def admit_completion(backend: Backend, body: CompletionRequest, id: str) -> list[GenerationRequest]:
    """One request for each prompt. Raises RequestError, Overloaded or NotReady."""
    prompts = await asyncio.to_thread(_prompt_ids, backend, body.prompt)
    limit = body.max_tokens or COMPLETION_TOKENS
    return _admit(backend, body, id, prompts, [limit] * len(prompts), "prompt")


async def admit_chat(backend: Backend, body: ChatCompletionRequest, id: str) -> list[GenerationRequest]:
    """The conversation as one request. Raises RequestError, Overloaded or NotReady."""
    ids = await asyncio.to_thread(encode_chat, backend.tokenizer, body.messages)
    limit = body.max_completion_tokens or body.max_tokens or max(1, backend.context - len(ids))
    return _admit(backend, body, id, [ids], [limit], "messages")


def _admit(
    backend: Backend,
    body: CompletionRequest | ChatCompletionRequest,
    id: str,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    param: str,
) -> list[GenerationRequest]:
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty. Give at least one token.", param=param, code="empty_prompt")
    if len(prompts) > backend.most_prompts:
        raise RequestError(
            f"'prompt' has {len(prompts)} prompts; this service takes at most {backend.most_prompts} in one request.",
            param=param,
        )
    domain = _domain(body.metadata or {})
    requests = [
        GenerationRequest(
            id=id if len(prompts) == 1 else f"{id}-{index}",
            prompt_ids=tuple(ids),
            params=_params(body, limit),
            domain=domain,
            tenant=body.user or "default",
        )
        for index, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    for request in requests:
        try:
            backend.decoder.check(request)
        except RequestError as error:
            if error.param == "prompt":  # the engine knows one name for it
                error.param = param
            raise
    return requests


def _params(body: CompletionRequest | ChatCompletionRequest, max_tokens: int) -> GenerationParams:
    return GenerationParams(
        sampling=Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            seeded=body.seed is not None,
        ),
        seed=body.seed,
        max_tokens=max_tokens,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        speculative=body.speculative is not False,
    )


def _prompt_ids(backend: Backend, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [_text_ids(backend, prompt)]
    prompts: list[list[int]] = []
    tokens: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            tokens.append(item)
        else:
            prompts.append(_text_ids(backend, item) if isinstance(item, str) else item)
    if tokens:
        prompts.append(tokens)
    for ids in prompts:
        if any(id >= backend.token_count for id in ids):
            raise RequestError(
                f"'prompt' has token id {max(ids)}; this model's ids are below {backend.token_count}.", param="prompt"
            )
    return prompts


def _text_ids(backend: Backend, text: str) -> list[int]:
    # An empty text is empty even where the tokenizer would put special tokens around it.
    return encode_text(backend.tokenizer, text) if text else []


def _domain(metadata: Mapping[str, str]) -> str:
    domain = metadata.get("domain", "default")
    if not re.fullmatch(DOMAIN_PATTERN, domain):
        raise RequestError(
            "'metadata.domain' must be 1 to 64 letters, digits, '_', '-' or '.'.", param="metadata.domain"
        )
    return domain
