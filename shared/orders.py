"""Orders to the learner, through Redis: whoever reaches Redis may give one, and waits for its answer.

The one door for whatever a person asks of a running learner, on one machine or on Kubernetes. An order that nobody
waits for any more is never carried out, and each is taken once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from shared.errors import Declined, ServiceDown
from shared.redis_link import RedisLink

WAIT_S = 60.0
_SLICE_S = 1  # of one blocking read; well below the link's own timeout
_KEEP_S = 60  # an answer that nobody fetches


@dataclass(frozen=True)
class Order:
    id: str
    name: str
    arguments: Mapping[str, Any]


class OrderBox:
    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._link = link
        self._queue, self._order, self._answer = f"{prefix}:orders", f"{prefix}:order:", f"{prefix}:answer:"

    def ask(self, name: str, *, wait_s: float = WAIT_S, **arguments: Any) -> Any:
        """What the learner answers (JSON). Raises Declined with its reason, and ServiceDown when it does not answer."""
        id = uuid4().hex
        text = json.dumps({"name": name, "arguments": arguments})

        def send(client: Any) -> None:
            with client.pipeline(transaction=True) as batch:
                batch.set(self._order + id, text, px=max(int(wait_s * 1000), 1))
                batch.rpush(self._queue, id)
                batch.expire(self._queue, 3600)
                batch.execute()

        self._link.run(send)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            found = self._link.run(lambda client: client.blpop([self._answer + id], timeout=_SLICE_S))
            if found is not None:
                answer = json.loads(cast("bytes", found[1]))
                if not answer["done"]:
                    raise Declined(answer["answer"])
                return answer["answer"]
        self._link.run(lambda client: client.delete(self._order + id))
        raise ServiceDown(f"the learner has not answered `{name}` within {wait_s:.0f} s; see `redraft status`")

    def take(self) -> Order | None:
        """The oldest order that somebody still waits for."""
        while (id := self._link.run(lambda client: client.lpop(self._queue))) is not None:
            name = cast("bytes", id).decode()
            text = self._link.run(lambda client, key=self._order + name: client.getdel(key))  # type: ignore[misc]
            if text is not None:
                return Order(name, **json.loads(cast("bytes", text)))
        return None

    def answer(self, order: Order, answer: Any, *, done: bool) -> None:
        """`answer` is JSON, or with `done` false the reason why not."""
        text = json.dumps({"done": done, "answer": answer})

        def send(client: Any) -> None:
            with client.pipeline(transaction=True) as batch:
                batch.rpush(self._answer + order.id, text)
                batch.expire(self._answer + order.id, _KEEP_S)
                batch.execute()

        self._link.run(send)
