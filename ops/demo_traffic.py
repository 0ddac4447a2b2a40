"""Users of the demo: each sends a prompt, reads the streamed answer, and sends the next, over real HTTP.

Runs in a thread of its own with its own event loop, so that drawing never slows traffic. A request that failed is
counted and not repeated.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import httpx

from ops.demo_chat import Answer, Asking, ask
from ops.demo_plan import Feed, Phase

_TIMEOUT = httpx.Timeout(10.0, read=180.0)
_LOST_S = 1.0  # pause of a user whose request failed before any text came
_STOP_S = 10.0


class Traffic:
    """`start()`, then look at `answers`; over by itself when the feed is, or after `stop()`."""

    def __init__(
        self,
        api: str,
        feed: Feed,
        asking: Asking,
        users: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.answers: list[Answer] = []  # appended to by the traffic's thread only
        self.started_at = 0.0  # seconds since the epoch
        self._api, self._feed, self._asking, self._users = api, feed, asking, users
        self._transport = transport
        self._first_sent: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._everybody: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def start(self) -> None:
        self.started_at = time.time()
        self._thread.start()

    @property
    def over(self) -> bool:
        """Raises what ended the traffic before its time."""
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    @property
    def phase(self) -> Phase | None:
        return self._feed.phase

    def first_sent(self, domain: str) -> float | None:
        """When the first request of a domain went out."""
        return self._first_sent.get(domain)

    def stop(self) -> None:
        """Hangs up on everybody who still waits."""

        def cancel() -> None:
            if self._everybody is not None:
                self._everybody.cancel()

        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(cancel)
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            self._everybody = self._loop.create_task(self._serve_all())
            self._loop.run_until_complete(self._everybody)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # handed to whoever asks whether it is over
            self._failure = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve_all(self) -> None:
        limits = httpx.Limits(max_connections=self._users, max_keepalive_connections=self._users)
        async with (
            httpx.AsyncClient(
                base_url=self._api, timeout=_TIMEOUT, limits=limits, transport=self._transport, trust_env=False
            ) as client,
            asyncio.TaskGroup() as users,
        ):
            for _ in range(self._users):
                users.create_task(self._user(client))

    async def _user(self, client: httpx.AsyncClient) -> None:
        while (prompt := self._feed.next(time.time() - self.started_at)) is not None:
            self._first_sent.setdefault(prompt.domain, time.time())
            answer = await ask(client, self._asking, prompt)
            self.answers.append(answer)
            if answer.error and not answer.first_at:
                await asyncio.sleep(_LOST_S)


def finish_times(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """By domain, of the requests that were answered."""
    times: dict[str, list[float]] = {}
    for answer in answers:
        if not answer.error:
            times.setdefault(answer.domain, []).append(answer.finished_at)
    return times
