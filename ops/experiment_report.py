"""What an experiment came to: one JSON object, the tables for a terminal, and whether each aim was met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ops.demo_files import about
from ops.experiment_arms import ARMS, OFFLINE_ALL, ONLINE, STATIC
from ops.experiment_findings import RESAMPLES, WITHIN, Draws, Floats, memory, recovery
from ops.experiment_result import ArmResult
from ops.experiment_settings import ExperimentSettings
from ops.experiment_traffic import Traffic
from shared.intervals import Interval

LAST_SHARE = 1 / 3
_METHOD = (
    "α is the sum of min(1, q/p) of the committed tokens over all committed positions, judged with the version that "
    "would have served the record, before anything learnt from it. Intervals: 95 % by request "
    f"({RESAMPLES} bootstrap draws within each domain, the same for all arms)."
)


def report(
    settings: ExperimentSettings, traffic: Traffic, results: Mapping[str, ArmResult], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The JSON object. `seconds` are those of this run, in which some of it may have been on disk already."""
    told = {**about(settings.to_dict()), "seconds": dict(seconds)}
    sums = _Sums(traffic, results, settings.seed)
    online = {name: result for name, result in results.items() if ARMS[name].kind == "online"}
    found: dict[str, Any] = {
        "traffic": {
            "sha256": traffic.sha256,
            "domains": [
                {
                    "domain": domain.name,
                    "records": len(domain.stream),
                    "tokens": sum(domain.tokens),
                    "records_apart": len(domain.apart),
                    "tokens_apart": domain.apart_tokens,
                }
                for domain in traffic.domains
            ],
        },
        "arms": {name: _arm(result, sums) for name, result in results.items()},
        "recovery": {name: sums.recoveries(name) for name in online} if OFFLINE_ALL in results else {},
        "memory": {name: _memories(result, traffic, settings.seed) for name, result in online.items()},
        "ahead": {name: sums.ahead(name) for name in online},
    }
    return {**found, "aims": _aims(found), "method": _METHOD, "run": told}


def show(found: Mapping[str, Any], console: Console) -> None:
    console.print(_alphas(found))
    for name, rows in found["recovery"].items():
        console.print(_recoveries(name, rows))
    for name, rows in found["memory"].items():
        if rows:
            console.print(_forgetting(name, rows))
    console.print(_METHOD, style="dim")
    for aim in found["aims"]:
        console.print(f"{aim['verdict']}: {aim['aim']}: {aim['measured']}", style=_STYLES[aim["verdict"]])


class _Sums:
    """Acceptances, positions and tokens by domain, as arrays in the order of the stream."""

    def __init__(self, traffic: Traffic, results: Mapping[str, ArmResult], seed: int) -> None:
        self.names = [domain.name for domain in traffic.domains]
        ends = np.cumsum([len(domain.stream) for domain in traffic.domains])
        self._cut = list(zip([0, *ends[:-1]], ends, strict=True))
        self._first = {name: self._split([j.first for j in result.judged]) for name, result in results.items()}
        self._positions = self._split([j.positions for j in results[STATIC].judged])
        self._tokens = self._split(traffic.tokens)
        self._draws = Draws([len(part) for part in self._tokens], seed)

    def alpha(self, arm: str, domains: Sequence[int]) -> Interval:
        return self._draws.ratio(self._first[arm], self._positions, domains)

    def difference(self, arm: str, other: str, domains: Sequence[int], *, last: float = 1.0) -> Interval:
        """α of `arm` minus that of `other`, over the last share of each domain's records."""
        over = [_last(mine - theirs, last) for mine, theirs in zip(self._first[arm], self._first[other], strict=True)]
        return self._draws.ratio(over, [_last(part, last) for part in self._positions], domains)

    @property
    def everything(self) -> range:
        return range(len(self.names))

    def recoveries(self, arm: str) -> list[dict[str, Any]]:
        """One a domain; the first is no drift, but the base has not seen its traffic either."""
        found = []
        for d, name in enumerate(self.names):
            first, other = self._first[arm][d], self._first[OFFLINE_ALL][d]
            result = recovery(first, other, self._positions[d], self._tokens[d], self._draws.by_domain[d])
            behind = self.difference(OFFLINE_ALL, arm, [d], last=LAST_SHARE)
            found.append({"domain": name, "drift": d > 0, **asdict(result), "behind_last_third": asdict(behind)})
        return found

    def ahead(self, arm: str) -> dict[str, Any]:
        """Of each other arm that does not learn online, over the whole stream."""
        others = [name for name in self._first if ARMS[name].kind != "online"]
        return {other: asdict(self.difference(arm, other, self.everything)) for other in others}

    def _split(self, values: Sequence[float]) -> list[Floats]:
        array = np.array(values, dtype=np.float64)
        return [array[start:end] for start, end in self._cut]


def _last(values: Floats, share: float) -> Floats:
    """Zeros in front of the last `share`, so that draws of whole domains fit."""
    kept = values.copy()
    kept[: int(len(kept) * (1 - share))] = 0.0
    return kept


def _arm(result: ArmResult, sums: _Sums) -> dict[str, Any]:
    accepted, tested = sum(j.accepted for j in result.judged), sum(j.tested for j in result.judged)
    return {
        "meaning": ARMS[result.arm].meaning,
        "alpha": asdict(sums.alpha(result.arm, sums.everything)),
        "alpha_by_domain": {name: asdict(sums.alpha(result.arm, [d])) for d, name in enumerate(sums.names)},
        "expected_accepted": accepted,  # by replay at the drafter's gamma
        "expected_tested": tested,
        "tokens_learnt": result.tokens_learnt,
        "promotions": len(result.versions) - 1 if result.versions else 0,
        "attempts": [asdict(attempt) for attempt in result.attempts],
        "versions": [asdict(version) for version in result.versions],
        "seconds": dict(result.seconds),
    }


def _memories(result: ArmResult, traffic: Traffic, seed: int) -> list[dict[str, Any]]:
    """Of every domain but the last, which has had no time to be forgotten."""
    last, found = result.versions[-1].name, []
    for domain in traffic.domains[:-1]:
        versions = {name: np.array(rows, dtype=np.float64) for name, rows in result.looked_back[domain.name].items()}
        found.append({"domain": domain.name, **asdict(memory(versions, last, seed))})
    return found


def _aims(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the online arm set out for. An aim that could not be measured is said to be."""
    if ONLINE not in found["arms"]:
        return []
    aims = []
    for row in found["recovery"].get(ONLINE, []):
        if row["drift"]:
            aim = f"within {WITHIN} of {OFFLINE_ALL} while {row['domain']} lasts"
            measured = f"after {_tokens(row['tokens'])} tokens ({_tokens(row['low'])} … {_tokens(row['high'])})"
            aims.append(_aim(aim, measured, row["tokens"] is not None, row["high"] is not None))
    if not aims:
        aims.append({"aim": f"within {WITHIN} of {OFFLINE_ALL}", "measured": "not measured", "verdict": "open"})
    for row in found["memory"][ONLINE]:
        lost = row["lost"]
        aim = f"at the end no more than {WITHIN} under its peak in {row['domain']}"
        aims.append(
            _aim(
                aim,
                f"{-lost['value']:+.3f} ({-lost['high']:+.3f} … {-lost['low']:+.3f})",
                lost["value"] <= WITHIN,
                lost["high"] <= WITHIN,
            )
        )
    ahead = found["ahead"][ONLINE][STATIC]
    measured = f"{ahead['value']:+.3f} ({ahead['low']:+.3f} … {ahead['high']:+.3f})"
    aims.append(_aim("ahead of static over the whole stream", measured, ahead["value"] > 0, ahead["low"] > 0))
    return aims


def _aim(aim: str, measured: str, met: bool, clear: bool) -> dict[str, str]:
    return {"aim": aim, "measured": measured, "verdict": "met" if met and clear else "not proven" if met else "missed"}


_STYLES = {"met": "green", "not proven": "yellow", "missed": "bold red", "open": "dim"}


def _alphas(found: Mapping[str, Any]) -> Table:
    domains = [domain["domain"] for domain in found["traffic"]["domains"]]
    table = Table(title="α by arm and domain (95 % interval by request)")
    table.add_column("arm")
    for name in (*domains, "whole stream", "tokens learnt", "promoted"):
        table.add_column(name, justify="right")
    for name, arm in found["arms"].items():
        intervals = [*(arm["alpha_by_domain"][domain] for domain in domains), arm["alpha"]]
        online = ARMS[name].kind == "online"
        table.add_row(
            name,
            *(f"{i['value']:.3f} ({i['low']:.3f} … {i['high']:.3f})" for i in intervals),
            f"{arm['tokens_learnt']:,}" if arm["tokens_learnt"] else "",
            f"{arm['promotions']} of {len(arm['attempts'])}" if online else "",
        )
    return table


def _recoveries(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"{name}: tokens after each start of a domain until α is within {WITHIN} of {OFFLINE_ALL}")
    for column in ("domain", "tokens", "95 % interval", "behind over the last third"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for row in rows:
        behind = row["behind_last_third"]
        table.add_row(
            row["domain"] if row["drift"] else f"{row['domain']} (start)",
            _tokens(row["tokens"]),
            f"{_tokens(row['low'])} … {_tokens(row['high'])}",
            f"{behind['value']:+.3f} ({behind['low']:+.3f} … {behind['high']:+.3f})",
        )
    return table


def _forgetting(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"{name}: α on earlier domains at the end, and when they were served best")
    for column in ("domain", "peak", "at the end", "lost", "95 % interval"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for row in rows:
        lost = row["lost"]
        interval = f"{lost['low']:+.3f} … {lost['high']:+.3f}"
        table.add_row(row["domain"], f"{row['peak']:.3f}", f"{row['end']:.3f}", f"{lost['value']:+.3f}", interval)
    return table


def _tokens(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"
