"""What a run showed, as one JSON object: counts first, and the few ratios that people ask for.

`alpha_live_last_third` and `alpha_static_last_third` are over all committed positions of the same requests, the last
third of each drifted domain (of every domain, where the traffic never drifted); `alpha_gain_ci95` is the 95 % interval
of their difference. `unlearnt` are the domains whose last third no promoted version served, where one could have been:
their gain says nothing. Windows of one moment are one entry for each domain; `tokens` and `t` count from the first
request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.demo_alpha import Measurement, agreement, gain_interval, last_third, live_alpha, ratio, static_alpha
from ops.demo_chat import Answer
from ops.demo_traffic import finish_times
from ops.demo_watch import Board
from ops.demo_windows import Window, counts_of, tokens_at


@dataclass(frozen=True)
class Run:
    """Everything that a finished run left. Times are seconds since the epoch."""

    board: Board
    answers: Sequence[Answer]
    drifted: Sequence[str]
    first_sent: Mapping[str, float]
    started_at: float
    ended_at: float  # of the traffic
    seed: int
    about: Mapping[str, Any]  # command, commit, versions, machine
    learning: bool = True  # False: the control, which promotes nothing

    @property
    def judged_domains(self) -> list[str]:
        """The drifted domains that got traffic; all, where none drifted."""
        seen = list(dict.fromkeys(answer.domain for answer in self.answers if not answer.error))
        return [domain for domain in self.drifted if domain in seen] or seen

    def tokens_at(self, time: float) -> float:
        return tokens_at(self.board.windows, [time])[0]


def report(run: Run) -> dict[str, Any]:
    """The JSON object."""
    board, seconds = run.board, max(run.ended_at - run.started_at, 1e-9)
    thirds = last_third(board.measurements, finish_times(run.answers), run.judged_domains)
    groups = list(thirds.values())
    everything = [m for group in groups for m in group]
    counters = board.counters
    swaps = counters.total("swaps")
    return {
        "windows": [entry for window in board.windows for entry in _window(window, run)],
        "promotions": [
            {
                "version": promotion.version,
                "tokens": round(run.tokens_at(promotion.at)),
                "seconds": round(promotion.at - run.started_at, 2),
                "reason": promotion.reason,
            }
            for promotion in board.promotions
        ],
        "drifts": [
            {"domain": domain, "tokens": round(run.tokens_at(at)), "seconds": round(at - run.started_at, 2)}
            for domain in run.drifted
            if (at := run.first_sent.get(domain)) is not None
        ],
        "domains": _domains(run),
        "alpha_live_last_third": _by_domain(live_alpha(everything), {d: live_alpha(g) for d, g in thirds.items()}),
        "alpha_static_last_third": _by_domain(
            static_alpha(everything), {d: static_alpha(g) for d, g in thirds.items()}
        ),
        "alpha_gain_ci95": gain_interval(groups, seed=run.seed),
        "alpha_gain_ci95_by_domain": {d: gain_interval([group], seed=run.seed) for d, group in thirds.items()},
        "last_third": {
            domain: {
                "requests": len(group),
                "positions": sum(m.positions for m in group),
                "live_sum": sum(m.live_sum for m in group),
                "static_sum": sum(m.static_sum for m in group),
            }
            for domain, group in thirds.items()
        },
        "unlearnt": _unlearnt(run, thirds),
        "attempts": int(board.learner.get("attempts", 0)),
        "agreement": asdict(agreement(board.measurements, seed=run.seed)),
        "requests": _requests(run),
        "tokens": counters.total("emitted"),
        "seconds": seconds,
        "tokens_per_second": counters.total("emitted") / seconds,
        "swaps": swaps,
        "swap_pause_seconds": ratio(counters.total("swap_pause_s"), swaps),  # mean of a swap in one replica
        "traces_dropped": counters.total("traces_dropped"),
        "features_dropped": counters.total("features_dropped"),
        "run": dict(run.about),
    }


def _unlearnt(run: Run, thirds: Mapping[str, Sequence[Measurement]]) -> list[str]:
    learnt = {promotion.version for promotion in run.board.promotions}
    return [
        domain
        for domain, group in thirds.items()
        if run.learning and group and not any(m.version in learnt for m in group)
    ]


def _by_domain(overall: float | None, domains: dict[str, float | None]) -> dict[str, Any]:
    return {"overall": overall, "domains": domains}


def _window(window: Window, run: Run) -> list[dict[str, Any]]:
    entries = []
    for domain, counts in window.domains.items():
        mine = [m for m in run.board.measurements if m.domain == domain and window.start <= m.finished_at < window.end]
        entries.append(
            {
                "t": round(window.end - run.started_at, 2),
                "tokens": window.tokens,
                "domain": domain,
                "accepted": counts.accepted,
                "tested": counts.tested,
                "alpha": ratio(counts.accepted, counts.tested),
                **_sums(mine),
                "version": window.version,
                "tokens_per_second": counts.emitted / max(window.end - window.start, 1e-9),
                "drafted": counts.drafted,
                "steps": counts.steps,
                "gamma": ratio(counts.drafted, counts.steps),
            }
        )
    return entries


def _sums(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Of the requests measured in a window: live and static acceptances over the same positions."""
    return {
        "measured": len(measurements),
        "positions": sum(m.positions for m in measurements),
        "live_sum": sum(m.live_sum for m in measurements),
        "static_sum": sum(m.static_sum for m in measurements),
        "static_expected_accepted": sum(m.static_expected_accepted for m in measurements),
        "static_expected_tested": sum(m.static_expected_tested for m in measurements),
    }


def _domains(run: Run) -> dict[str, Any]:
    answered = Counter(answer.domain for answer in run.answers if not answer.error)
    names = dict.fromkeys([*answered, *run.board.counters.tag_values("domain")])
    return {
        domain: {
            "requests": answered[domain],
            **asdict(counts_of(run.board.counters, domain)),
            **_sums([m for m in run.board.measurements if m.domain == domain]),
        }
        for domain in names
    }


def _requests(run: Run) -> dict[str, Any]:
    answered = [answer for answer in run.answers if not answer.error]
    errors = [answer.error for answer in run.answers if answer.error]
    waits = sorted(answer.first_at - answer.sent_at for answer in answered if answer.first_at)
    return {
        "sent": len(run.answers),
        "answered": len(answered),
        "failed": len(errors),
        "first_error": errors[0] if errors else "",
        "measured": len(run.board.measurements),
        "unmeasured": max(len(answered) - len(run.board.measurements), 0),
        "first_text_seconds_median": waits[len(waits) // 2] if waits else None,
    }
