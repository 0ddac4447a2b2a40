"""The learner's life: consume, attempt, promote, report; one thread, one thing after the other.

`tick` is what must go on at all times (traces, orders from outside, Redis at the champion, windows, the heartbeat), and
goes on inside an attempt too. Redis, MLflow or the replicas may be away: that is said, counted and tried again. What
waiting cannot mend (no drafter, a wrong setting) is said, and the rest of the work is done without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from learner.attempt import WAIT_MS, Attempt, Prepare
from learner.base import load_base
from learner.buffer import read_measurements
from learner.database import of_the_disk
from learner.features import FeatureInbox
from learner.journal import Journal
from learner.orders import follow
from learner.parts import Parts, assemble, buffer_file
from learner.registry import Registry
from learner.report import attempt_entry, version_facts, window_values
from learner.schedule import Outcome, Plan, plan_attempt, tried_in_vain
from learner.windows import WindowMeter
from shared.config import Config
from shared.counters import Counters
from shared.errors import NotReady, RedraftError, ServiceDown
from shared.orders import Order
from shared.store import Champion, Store

BEAT_S, RECONCILE_S, RETRY_S = 1.0, 2.0, 1.0
LOAD_AGAIN_S = 60.0
STATUS_TTL_S = 30
DECISIONS_SHOWN = 8
NAME = "learner"

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Unwinds an attempt when the learner is told to end. Never leaves this module."""


class Abandoned(Exception):
    """Unwinds an attempt whose data are gone. Never leaves this module."""


class LearnerLoop:
    """`run` is the thread; the other public methods may be called from any thread.

    `prepare` is what is done to examples before they are learnt from: nothing, but in tests. `watch` is told of every
    heartbeat.
    """

    def __init__(
        self,
        config: Config,
        *,
        session: str = "",
        prepare: Prepare = lambda examples: examples,
        watch: Callable[[Mapping[str, Any]], None] = lambda _status: None,
    ) -> None:
        self.config = config
        self.inbox = FeatureInbox(config.trace.feature_tokens)
        self._store = Store(config.redis.url, config.redis.prefix)
        self._journal = Journal(Registry(config, session) if config.mlflow.tracking_uri else None)
        self._prepare, self._watch = prepare, watch
        self._parts: Parts | None = None
        self._file: Path | None = None
        self._meter = WindowMeter()
        self._counters = Counters()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_SHOWN)
        self._stop = threading.Event()
        self._paused = self._attempting = False
        self._doing, self._trouble = "starting", dict[str, str]()
        self._plan = Plan(False, "")
        self._status: dict[str, Any] = {"state": self._doing}
        self._due = dict.fromkeys(("load", "look", "redis", "fleet", "reconcile", "window", "beat"), 0.0)  # monotonic
        self._measured_to = 0  # order of the last measured request that a window has shown

    # From any thread

    def measurements(self, after: int) -> list[dict[str, Any]]:
        """Measured requests with an order above `after`, a thousand at most."""
        return read_measurements(self._file, after) if self._file is not None else []

    def pause(self) -> None:
        """No attempt is begun; reading, measuring and reporting go on."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> None:
        """Ends `run` within a training step."""
        self._stop.set()

    @property
    def status(self) -> dict[str, Any]:
        """The last heartbeat."""
        return self._status

    # The loop's own thread

    def run(self) -> None:
        """Until `stop`. Nothing that happens inside ends it."""
        self._journal.start()
        while not self._stop.is_set():
            try:
                self.step()
                self._trouble.pop("defect", None)
                self._trouble.pop("disk", None)
            except Stopped:
                break
            except Exception as error:
                self._stumble(error)
                self._stop.wait(RETRY_S)
        self._journal.stop()
        if self._parts is not None:
            self._parts.database.close()
        self._store.close()

    def _stumble(self, error: Exception) -> None:
        """Said, counted, and tried again."""
        if not of_the_disk(error):
            log.error("the learner stumbled", exc_info=error)
            self._counters.add("stumbles")
            self._trouble["defect"] = f"{type(error).__name__}: {error}"
            return
        if "disk" not in self._trouble:
            log.error("the learner cannot write: %s", error)
        self._counters.add("disk_failures")
        self._trouble["disk"] = f"the learner's disk: {error}; nothing is acknowledged, traces wait in the stream"

    def step(self) -> None:
        """One round: what must always go on, and an attempt if one is due."""
        self.tick("reading traces", WAIT_MS)
        parts = self._parts
        if parts is None:
            return
        self._plan = plan_attempt(parts.situation(), self.config.learner.min_fresh_tokens)
        if parts.progress.running:
            self._plan = Plan(True, "it was interrupted", parts.progress.focus)
        if self._plan.attempt and not self._paused:
            self._attempting = True
            try:
                self._attempt(parts, self._plan)
            finally:
                self._attempting = False

    def tick(self, doing: str, wait_ms: int) -> None:
        """What must always go on. Waits at most about `wait_ms` for traces; raises Stopped."""
        if self._stop.is_set():
            raise Stopped
        self._doing = doing
        if self._parts is None and self._is_due("load", LOAD_AGAIN_S):
            self._load()
        if self._is_due("look", BEAT_S):
            self._status = self._look()
            self._watch(self._status)
        if self._parts is None or time.monotonic() < self._due["redis"]:
            self._stop.wait(wait_ms / 1000)
        if time.monotonic() < self._due["redis"]:
            return
        try:
            self._use_redis(wait_ms)
            self._trouble.pop("redis", None)
        except ServiceDown as error:
            if "redis" not in self._trouble:
                log.warning("%s; the learner waits", error)
            self._trouble["redis"] = str(error)
            self._counters.add("redis_failures")
            self._due["redis"] = time.monotonic() + RETRY_S

    def _use_redis(self, wait_ms: int) -> None:
        parts = self._parts
        self._obey()
        if parts is not None:
            parts.consumer.step(wait_ms)
            if self._is_due("fleet", BEAT_S):
                parts.fleet.look(self._store.statuses(), self._store.counters())
                parts.releases.look()
            if self._is_due("reconcile", RECONCILE_S):
                parts.rollout.reconcile()
                self._erase(parts)
        if self._is_due("window", self.config.mlflow.window_s):
            self._window()
        if self._is_due("beat", BEAT_S):
            self._store.put_status(NAME, self._status, ttl_s=STATUS_TTL_S)

    def _erase(self, parts: Parts) -> None:
        erased = parts.erasure.obey()
        if not erased or not parts.progress.running:
            return
        reason = f"kept: {', '.join(erased)} was erased during the attempt"
        self._ended(parts, "undecided", parts.progress.trained_to, reason)
        if self._attempting:
            raise Abandoned(reason)

    def _load(self) -> None:
        try:
            base = load_base(self.config)
            if base is None:
                self._trouble["drafter"] = "nothing drafts here, so there is nothing to learn"
                return
            parts = assemble(
                self.config, base, store=self._store, journal=self._journal, inbox=self.inbox, prepare=self._prepare
            )
        except RedraftError as error:
            log.error("the learner cannot learn: %s", error)
            self._trouble["drafter"] = str(error)
            return
        self._trouble.pop("drafter", None)
        kept = parts.database.state("windows") or {}
        self._meter, self._measured_to = WindowMeter(kept.get("meter")), int(kept.get("measured_to", 0))
        self._decisions.extend(parts.database.state("decisions") or ())
        self._file, self._parts = buffer_file(self.config.home_path, base), parts

    def _attempt(self, parts: Parts, plan: Plan) -> None:
        champion, progress = parts.releases.leading, parts.progress.begun(plan.focus)
        parts.keep(progress)
        log.info("attempt %d: %s", progress.attempts, plan.reason)
        try:
            attempt = parts.runner.run(
                progress.attempts,
                focus=plan.focus or tuple(parts.buffer.fresh_tokens(progress.trained_to)),
                name=parts.shelf.next_version(),
                parent=champion.version,
                parent_artifact=parts.shelf.artifact(champion.version),
                breathe=parts.budget.paced(
                    lambda doing, wait_ms: self.tick(f"attempt {progress.attempts}: {doing}", wait_ms)
                ),
            )
        except Stopped:
            raise
        except Abandoned as reason:
            log.warning("attempt %d: %s", progress.attempts, reason)
            return
        except Exception as error:  # whatever it was, another attempt at once would meet it again
            if of_the_disk(error):
                raise  # the attempt is made again when there is room
            log.exception("attempt %d failed", progress.attempts)
            self._counters.add("attempts_failed")
            self._ended(parts, "refused", parts.buffer.newest(), f"kept: the attempt failed ({error})")
            return
        if attempt is None:
            self._ended(parts, "undecided", parts.buffer.newest(), "kept: nothing to learn from")
            return
        self._conclude(parts, attempt, champion, plan.reason)

    def _conclude(self, parts: Parts, attempt: Attempt, champion: Champion, why: str) -> None:
        outcome, reason = attempt.outcome, attempt.decision.reason
        barred = parts.releases.barred()
        if parts.releases.leading.number != champion.number:
            outcome, reason = "undecided", f"kept: {champion.version} was replaced during the attempt"
        elif outcome == "promoted" and barred:
            outcome, reason = "barred", f"{barred}, though {reason.removeprefix('promoted: ')}"
        if outcome == "promoted":
            parts.releases.promote(attempt.artifact, version_facts(attempt))
        self._ended(parts, outcome, attempt.snapshot, reason)
        log.info("attempt %d: %s", attempt.number, reason)
        if tried_in_vain(parts.progress):
            parts.settle()
        self._journal.attempt(attempt_entry(attempt, outcome, reason, why, self.config))

    def _ended(self, parts: Parts, outcome: Outcome, trained_to: int, reason: str) -> None:
        self._counters.add(f"decisions.{outcome}")
        number = parts.progress.attempts
        self._decisions.append({"at": time.time(), "attempt": number, "outcome": outcome, "reason": reason[:300]})
        parts.database.keep_state("decisions", list(self._decisions))
        parts.keep(parts.progress.ended(outcome, trained_to, reason))

    def _window(self) -> None:
        now = time.time()
        window = self._meter.cut(self._store.counters(), now)
        parts = self._parts
        if parts is None:
            self._journal.window(window.values, step=window.tokens, at=now)
            return
        economy = parts.account(window.decoding, self._measured_to)
        measured, self._measured_to = parts.buffer.sums_since(self._measured_to)
        if window.values or measured:
            number = parts.rollout.champion.number
            values = window_values(window.values, parts.lookout.scores(), number, measured)
            values |= {f"economy/{name}": value for name, value in economy.items()}
            self._journal.window(values, step=window.tokens, at=now)
        parts.database.keep_state("windows", {"meter": self._meter.to_keep(), "measured_to": self._measured_to})

    def _look(self) -> dict[str, Any]:
        parts = self._parts
        found: dict[str, Any] = {
            "at": time.time(),
            "state": "paused" if self._paused and not self._attempting else self._doing,  # a pause lets an attempt end
            "trouble": list(self._trouble.values()),
            "counters": dict(self._counters.fields),
        }
        if parts is not None:
            progress, champion = parts.progress, parts.rollout.champion
            found |= {
                "champion": champion.version,
                "number": champion.number,
                "base": parts.base.hash,
                "target": parts.base.target,
                "kind": parts.base.kind,
                "attempts": progress.attempts,
                "promotions": progress.promotions,
                "refusals": progress.refusals,
                **parts.releases.status(),
                "decision": progress.decision,
                "decisions": list(self._decisions),
                "next": self._plan.reason,
                "economy": parts.economy.report(parts.budget.spent_s),
                "fresh_tokens": sum(parts.buffer.fresh_tokens(progress.trained_to).values()),
                "drift": {domain: round(score, 3) for domain, score in parts.lookout.scores().items()},
                "kept": parts.buffer.counts(),
                "waiting": parts.consumer.waiting,
                "counters": {
                    **found["counters"],
                    **parts.consumer.counters.fields,
                    "features_crowded_out": self.inbox.crowded_out,
                    "versions_unknown": parts.measurer.unknown_versions,
                    "requests_constrained": parts.measurer.constrained,
                    **parts.fleet.late.fields,
                },
            }
        return found | {"mlflow": self._journal.status()}

    def _obey(self) -> None:
        while (order := self._store.orders.take()) is not None:
            try:
                answer, done = self._follow(order), True
            except RedraftError as error:
                answer, done = str(error), False
            except (TypeError, ValueError) as error:  # an order of another release
                answer, done = f"{order.name}: {error}", False
            self._store.orders.answer(order, answer, done=done)

    def _follow(self, order: Order) -> Any:
        if order.name in ("pause", "resume"):
            return self.pause() if order.name == "pause" else self.resume()
        if self._parts is None:
            raise NotReady("The learner has not loaded its drafter; see `redraft status`.")
        return follow(order, self._parts, self._store)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True
