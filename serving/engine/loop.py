"""One thread that steps the engine, and the asyncio side that waits for it.

Owns the inbox: requests, cancellations and swaps are handed over under a lock and acted on between two rounds only.
Every request that `generate` has accepted gets exactly one Ending, also when a step breaks or the loop is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from serving.engine.engine import Engine
from serving.engine.events import Delta, Ending, Event, RequestStats
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence
from serving.latency import Latency
from shared.errors import NotReady, Overloaded

log = logging.getLogger(__name__)
_Events = asyncio.Queue[Event]
_PRICES_S = 1.0  # between two looks at what rounds cost


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine as it is between two rounds."""

    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    drafter_version: str
    alpha_by_domain: dict[str, float]  # the controller's own decayed estimate
    draining: bool
    counters: dict[str, float]
    round_s: tuple[float, ...] = ()  # expected seconds of a round by gamma, at the present batch


@dataclass(frozen=True)
class _Address:
    """Where a request's events go."""

    loop: asyncio.AbstractEventLoop
    events: _Events


class EngineLoop:
    """Runs an engine for many asyncio callers. `listen` must be the engine's listener."""

    def __init__(self, engine: Engine, *, max_queue: int) -> None:
        self._engine, self._max_queue = engine, max_queue
        self.latency = Latency()
        self._wake = threading.Condition()
        self._arrived: list[tuple[GenerationRequest, _Address]] = []
        self._cancelled: set[str] = set()
        self._between: list[Callable[[Engine], None]] = []
        self._addresses: dict[str, _Address] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_Events, Event]]] = {}  # of this round
        self._sequences: dict[str, Sequence] = {}
        self._stopping = self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._priced_at = 0.0  # monotonic
        self._round_s: tuple[float, ...] = ()
        self._snapshot = self._look()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the stepping thread has ended."""
        return self._thread.is_alive()

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, Overloaded or NotReady if `generate` would refuse."""
        if self._stopping or self._draining:
            raise NotReady("This replica is shutting down and takes no new requests. Try again.")
        self._engine.check(request)
        waiting = len(self._arrived) + len(self._engine.scheduler.waiting)
        if waiting >= self._max_queue:
            raise Overloaded(
                f"{waiting} requests are waiting already, as many as this replica queues. Try again in a second.",
                retry_after_s=1,
            )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Deltas, then exactly one Ending. Closing the iterator early cancels the request."""
        self.check(request)
        events: _Events = asyncio.Queue()
        address = _Address(asyncio.get_running_loop(), events)
        with self._wake:
            if self._stopping:
                raise NotReady("This replica is shutting down and takes no new requests. Try again.")
            self._arrived.append((request, address))
            self._wake.notify()
        ended, watch = False, self.latency.begin()
        try:
            while not ended:
                event = await events.get()
                ended = isinstance(event, Ending)
                if isinstance(event, Delta) and event.token_ids:
                    watch.tokens(len(event.token_ids))
                yield event
        finally:
            if not ended:
                with self._wake:
                    self._cancelled.add(request.id)
                    self._wake.notify()

    def snapshot(self) -> EngineSnapshot:
        """As of the last round."""
        return self._snapshot

    def between_rounds(self, action: Callable[[Engine], None]) -> None:
        """Run `action` on the stepping thread before the next round (law 7)."""
        with self._wake:
            self._between.append(action)
            self._wake.notify()

    def listen(self, sequence: Sequence, event: Event) -> None:
        """The engine's listener."""
        address = self._addresses.get(sequence.id)
        if isinstance(event, Ending):
            self._addresses.pop(sequence.id, None)
            self._sequences.pop(sequence.id, None)
        if address is not None:
            self._post(address, event)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait until all is answered; False when time ran out."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._wake:
                if not self._arrived and not self._sequences:
                    return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """End the thread; what still runs ends as cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._engine.idle and not (self._arrived or self._between or self._stopping):
                    self._wake.wait(0.5)
                arrived, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, set()
                between, self._between = self._between, []
                stopping = self._stopping
                for request, address in arrived:  # under the lock: whoever drains sees a request here or there
                    self._addresses[request.id] = address
                    self._sequences[request.id] = self._engine.add(request)
            for name in cancelled & self._sequences.keys():
                self._sequences[name].cancelled = True
            for action in between:
                self._guard(lambda action=action: action(self._engine))  # type: ignore[misc]
            if stopping:
                self._cancel_all()
                self._send()
                self._snapshot = self._look()
                return
            self._guard(self._engine.step)
            self._send()
            self._snapshot = self._look()

    def _post(self, address: _Address, event: Event) -> None:
        self._outbox.setdefault(address.loop, []).append((address.events, event))

    def _send(self) -> None:
        """Wake each event loop once a round, however many of its requests have news."""
        for loop, posts in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_put_all, posts)
            except RuntimeError:  # the callers' event loop is closed: nobody listens any more
                log.debug("nobody waits for %d events", len(posts))
        self._outbox = {}

    def _guard(self, action: Callable[[], None]) -> None:
        """A defect in a round ends the requests in it, clearly, and leaves an engine that serves the next ones."""
        try:
            action()
        except Exception as error:
            log.exception("a round failed")
            self._engine.fail_all(f"the engine failed in a round ({type(error).__name__}); send the request again")

    def _cancel_all(self) -> None:
        for sequence in list(self._engine.scheduler):
            self._engine.end(sequence, "cancelled", "the replica is shutting down")
        with self._wake:
            left, self._arrived = self._arrived, []
        for request, address in left:
            message = "the replica is shutting down"
            self._post(address, Ending("cancelled", len(request.prompt_ids), 0, RequestStats(), message))

    def _look(self) -> EngineSnapshot:
        engine = self._engine
        drafter = engine.drafter
        return EngineSnapshot(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            blocks_free=engine.allocator.free,
            blocks_total=engine.allocator.num_blocks,
            drafter_version=drafter.version if drafter is not None else "",
            alpha_by_domain={domain: engine.controller.alpha(domain) for domain in engine.domains},
            draining=self._draining or self._stopping,
            counters=dict(engine.counters.fields),
            round_s=self._prices(),
        )

    def _prices(self) -> tuple[float, ...]:
        """Costs change slowly, rounds are many."""
        now = time.monotonic()
        if now - self._priced_at >= _PRICES_S:
            self._priced_at = now
            self._round_s = self._engine.controller.round_seconds(max(len(self._engine.scheduler.running), 1))
        return self._round_s


def _put_all(posts: list[tuple[_Events, Event]]) -> None:
    for events, event in posts:
        events.put_nowait(event)
