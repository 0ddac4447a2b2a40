"""Turns the replicas' cumulative counters into windows: what came since the last one, by domain and overall.

Counts first, ratios only at the end and only where something was counted. A replica that restarts begins a new epoch at
0; one that comes back with lower counts than before is not counted twice. It knows nothing of MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learner.economy import Decoding
from shared.counters import Counters

Epochs = Mapping[tuple[str, str], Mapping[str, float]]  # (replica, epoch) -> cumulative counters
DOMAINS = 32  # that get curves of their own


@dataclass(frozen=True)
class Window:
    seconds: float  # 0: not known
    tokens: int  # emitted up to the end of this window, earlier lives included
    values: Mapping[str, float]  # `name` over everything, `name/domain` for each domain
    decoding: Decoding


class WindowMeter:
    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        """`kept` is what `to_keep` gave in an earlier life; without it the first window is empty and sets the zero."""
        self._zeroed = kept is not None
        kept = kept or {}
        self._last = {(replica, epoch): Counters(counts) for replica, epoch, counts in kept.get("counters", ())}
        self._tokens = int(kept.get("tokens", 0))
        self._at = 0.0  # of the last cut in this life; how long we were away says nothing of tokens per second

    def to_keep(self) -> dict[str, Any]:
        """JSON that a later life starts from."""
        counters = [[replica, epoch, counts.fields] for (replica, epoch), counts in self._last.items()]
        return {"tokens": self._tokens, "counters": counters}

    def cut(self, epochs: Epochs, now: float) -> Window:
        """The window that ends now."""
        current = {key: Counters(counts) for key, counts in epochs.items()}
        gained = [new.minus(self._last.get(key, Counters())) for key, new in current.items()]
        came = Counters.merge(part.fields for part in gained) if self._zeroed else Counters()
        seconds = max(now - self._at, 1e-3) if self._at else 0.0
        # An epoch that is not there for once (Redis came back empty) must not count from 0 when it is there again.
        self._last |= current
        self._zeroed, self._at = True, now
        self._tokens += int(came.total("emitted"))
        return Window(seconds, self._tokens, _values(came, seconds), _decoding(came))


def _decoding(came: Counters) -> Decoding:
    spent = sum(came.total(name) for name in ("draft_s", "verify_s", "sample_s"))
    return Decoding(came.total("emitted"), came.total("steps"), spent)


def _values(came: Counters, seconds: float) -> dict[str, float]:
    if not came.total("emitted"):
        return {}
    values = _of(came, None, seconds)
    domains = sorted(came.tag_values("domain"), key=lambda domain: -came.total("emitted", domain=domain))
    for domain in domains[:DOMAINS]:
        values |= {f"{name}/{domain}": value for name, value in _of(came, domain, seconds).items()}
    return values


def _of(came: Counters, domain: str | None, seconds: float) -> dict[str, float]:
    accepted, tested = came.alpha_counts(domain=domain)
    drafted, rounds = came.total("drafted", domain=domain), came.total("spec_steps", domain=domain)
    steps, emitted = came.total("steps", domain=domain), came.total("emitted", domain=domain)
    values = {"accepted": accepted, "tested": tested, "tokens": emitted}
    ratios = {
        "alpha": (accepted, tested),
        "gamma": (drafted, rounds),
        "tokens_per_step": (emitted, steps),
        "tokens_per_second": (emitted, seconds),
    }
    return values | {name: over / under for name, (over, under) in ratios.items() if under}
