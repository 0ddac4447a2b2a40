"""An ASGI wrapper that puts plain-text error answers into OpenAI's envelope.

Frameworks and Ray's proxy refuse some requests before our code sees them (too large, queue full, no route, replica
lost), and say so as plain text. Answers of our own pass through untouched, streams included. Ray's own pages below
`/-/` are left alone.
"""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import envelope

_CODES = {404: "unknown_url", 408: "timeout", 413: "request_too_large", 429: "rate_limit_exceeded", 503: "not_ready"}
_KEPT = ("allow", "retry-after")
PROXY_CALLBACK = "serving.api.enveloped.proxy_middlewares"


class Enveloped:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        if not answer.started:  # the wrapped application gave up without a word
            await answer.say(500, "The replica failed on this request.", {})


class _Answer:
    """One response on its way out; `plain` is set while a plain-text error is being collected."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._plain: Message | None = None
        self._text = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            if message["status"] >= 400 and content_type.startswith("text/plain"):
                self._plain = message
                return
        elif self._plain is not None and message["type"] == "http.response.body":
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                headers = Headers(raw=self._plain["headers"])
                kept = {name: headers[name] for name in _KEPT if name in headers}
                await self.say(self._plain["status"], self._text.decode("utf-8", "replace"), kept)
            return
        await self._send(message)

    async def say(self, status: int, text: str, headers: dict[str, str]) -> None:
        code = _CODES.get(status, "internal_error" if status >= 500 else None)
        body = json.dumps(envelope(status, text or f"HTTP status {status}", code=code)).encode()
        if status in (429, 503):
            headers.setdefault("retry-after", "1")
        headers |= {"content-type": "application/json", "content-length": str(len(body))}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})


def proxy_middlewares() -> list[Middleware]:
    """What Ray's proxies wrap around themselves; they find it by PROXY_CALLBACK."""
    return [Middleware(Enveloped)]
