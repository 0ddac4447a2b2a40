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

from serving.api.answers import ChatForm, Choice, Form, Head, TextForm, chunk, usage_chunk, whole_answer
from serving.api.service import Backend, Decoder
from serving.api.stream import DONE, event
from serving.engine.events import Delta, Ending, Event
from serving.engine.request import GenerationRequest
from shared.errors import NotReady, RedraftError

TEXT, CHAT = TextForm(), ChatForm()


def new_head(backend: Backend, form: Form) -> Head:
    return Head(form.prefix + uuid.uuid4().hex, int(time.time()), backend.name, backend.system_fingerprint)


async def complete(backend: Backend, requests: Sequence[GenerationRequest], head: Head, form: Form) -> dict[str, Any]:
    """The whole answer. Raises RedraftError if a request does not come to a regular end."""
    choices = [Choice() for _ in requests]
    async with aclosing(_interleave(backend.decoder, requests)) as events:
        async for index, item in events:
            _grow(choices[index], item)
    return whole_answer(head, form, choices)


async def stream(
    backend: Backend, requests: Sequence[GenerationRequest], head: Head, form: Form, *, with_usage: bool
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events. Raises as `complete` does."""
    choices = [Choice() for _ in requests]
    opened = [False] * len(requests)
    async with aclosing(_interleave(backend.decoder, requests)) as events:
        async for index, item in events:
            _grow(choices[index], item)
            if not opened[index]:
                opened[index] = True
                if (opening := form.opening(index)) is not None:
                    yield event(chunk(head, form, opening, with_usage=with_usage))
            if isinstance(item, Ending):
                yield event(chunk(head, form, form.closing(index, choices[index]), with_usage=with_usage))
            elif item.text:
                yield event(chunk(head, form, form.piece(index, item.text), with_usage=with_usage))
    if with_usage:
        yield event(usage_chunk(head, form, choices))
    yield DONE


def _grow(choice: Choice, item: Event) -> None:
    if isinstance(item, Delta):
        choice.text += item.text
    elif item.reason == "failed":
        raise RedraftError(item.message or "the engine failed on this request")
    elif item.reason == "cancelled":  # not by this client: it would not read this
        raise NotReady(item.message or "The request was cancelled because the replica is stopping.")
    else:
        choice.ending = item


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
