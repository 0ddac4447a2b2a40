"""Reading a streamed answer of an OpenAI-compatible server: its chunks, its end, its errors.

A stream that is left early costs the connection, so it is read to its end; one that ends without [DONE] has failed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from shared.errors import ServiceDown


async def chunks_of(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Every chunk in order. Raises ServiceDown for an error event or a missing end, ValueError for what is not JSON."""
    done = False
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServiceDown(message_of(data))
        yield chunk
    if not done:
        raise ServiceDown("the answer ended without [DONE]")


def message_of(body: str) -> str:
    """The message of an error envelope, or the beginning of whatever came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]
