"""Runs the admitted requests of one HTTP request and writes the answer, whole or as a stream.

Invariant: all of an answer's requests end together: if one fails or the client leaves, the others are cancelled.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from serving.api.admission import Admitted
from serving.api.answers import Choice, Form, Head, chunk, said_something, usage_chunk, usage_of, whole_answer
from serving.api.errors import error_of
from serving.api.schema import StreamOptions
from serving.api.service import Backend, Decoder
from serving.api.stream import DONE, event
from serving.engine.events import Ending, Event
from serving.engine.request import GenerationRequest


def new_head(backend: Backend, prefix: str) -> Head:
    return Head(prefix + uuid.uuid4().hex, int(time.time()), backend.name, backend.system_fingerprint)


async def complete(backend: Backend, admitted: Admitted, head: Head, form: Form) -> dict[str, Any]:
    """The whole answer. Raises RedraftError if a request does not come to a regular end."""
    choices = _choices(admitted)
    async for _ in _events(backend.decoder, admitted, choices):
        pass
    return whole_answer(head, form, _best(admitted, choices), choices)


async def stream(
    backend: Backend, admitted: Admitted, head: Head, form: Form, options: StreamOptions | None
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events. Raises as `complete` does."""
    choices = _choices(admitted)
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    async with aclosing(_events(backend.decoder, admitted, choices)) as events:
        async for choice, item in events:
            # Where the client asked for usage, each chunk has it so far, or says that it is not here yet.
            usage = {"usage": usage_of(choices)} if continuous else {"usage": None} if with_usage else {}
            for body in form.chunks(choice, item):
                yield event(chunk(head, form, body, usage))
    if with_usage:
        yield event(usage_chunk(head, form, choices))
    yield DONE


def _choices(admitted: Admitted) -> list[Choice]:
    views = [view for view in admitted.prompts for _ in range(admitted.candidates)]
    return [Choice(view, index) for index, view in enumerate(views)]


def _best(admitted: Admitted, choices: list[Choice]) -> list[Choice]:
    """Of each prompt's candidates those with the highest mean log-probability, numbered anew."""
    if admitted.shown == admitted.candidates:
        return choices
    best: list[Choice] = []
    for first in range(0, len(choices), admitted.candidates):
        ranked = sorted(choices[first : first + admitted.candidates], key=lambda choice: -choice.mean_logprob)
        best += ranked[: admitted.shown]
    for index, choice in enumerate(best):
        choice.index = index
    return best


async def _events(
    decoder: Decoder, admitted: Admitted, choices: Sequence[Choice]
) -> AsyncGenerator[tuple[Choice, Event], None]:
    """Each event behind the choice that has taken it. Raises RedraftError for an irregular end."""
    silent = True
    async with aclosing(_interleave(decoder, admitted.requests)) as events:
        async for index, item in events:
            silent = silent and not said_something(item)
            if isinstance(item, Ending) and (error := error_of(item, silent=silent, grammar_field=admitted.blamed)):
                raise error
            choices[index].take(item)
            yield choices[index], item


async def _interleave(
    decoder: Decoder, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """(choice, event) of all requests in the order of arrival, until each has had its Ending."""
    arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def feed(index: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(decoder.generate(request)) as events:
                async for item in events:
                    arrived.put_nowait((index, item))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    try:
        open_requests = len(requests)
        while open_requests:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            open_requests -= isinstance(item, Ending)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
