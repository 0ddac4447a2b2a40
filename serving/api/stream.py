"""Server-sent events, and clients that go away.

Invariant: when the client disconnects, or the server cancels the request, the events' generator is closed before the
call returns, so the engine stops decoding for nobody. Nothing is sent before the first event exists: what fails until
then is an ordinary HTTP error. What fails later is an error event, after which the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.errors import envelope, envelope_of, response_to
from shared.errors import RedraftError

DONE = "data: [DONE]\n\n"
T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client disconnected before its answer was ready. Never leaves `serving.api`."""


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled and waited for if the client goes first (raises ClientGone)."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Sends `events` (from `event`) as they come."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send_all(scope, receive, send), receive)
        except ClientGone:
            log.debug("a client left its stream")

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except RedraftError as error:
                await response_to(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, first)
            try:
                async for text in events:
                    await self._send(send, text)
            except RedraftError as error:
                await self._send(send, event(envelope_of(error)))
            except Exception:
                log.exception("a stream failed")
                message = "The server failed on this request."
                await self._send(send, event(envelope(500, message, code="internal_error")))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
