"""`redraft gate-power`: how often the gate promotes what is no better, and how often it sees what is.

Real paired judgements are turned into candidates of a known quality: flipping a request's two sides at random leaves
its differences as they were and their mean at 0, a shift adds a known gain in alpha. Every candidate has flips and
requests of its own. The judgements come from a learner's buffer, or from a file that this command recorded.
"""

from __future__ import annotations

import json
import sqlite3
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from learner.database import reading
from learner.evaluator import Judged
from learner.gate import Gate
from ops import settings
from ops.demo_files import about, write_json
from ops.report_sources import newest_buffer
from shared.acceptance import expected_tokens
from shared.config import GateConfig
from shared.errors import ConfigError

GAINS = (0.0, 0.02, 0.05)  # in alpha
IN_A_ROW = 10  # attempts of which any may promote
_SIZES = (1, 3, 8)  # times gate.min_requests; 8 is what an attempt judges at most


@dataclass(frozen=True)
class Side:
    """Expected counts of one drafter on one request."""

    accepted: float
    tested: float


@dataclass(frozen=True)
class PairedRequest:
    domain: str
    gamma: int
    positions: int
    live: Side  # a trained version
    static: Side  # the base


@dataclass(frozen=True)
class Row:
    """Of `candidates` of one quality, judged on `requests` each."""

    requests: int
    gain: float
    candidates: int
    promoted: int  # by tokens a second, as the gate does
    by_alpha: int  # would have been, on alpha alone
    in_a_row: tuple[int, int]  # runs of IN_A_ROW attempts in which any was promoted, and all runs


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--buffer", metavar="FILE", help="a learner's buffer.sqlite (default: the newest of this home)")
    source.add_argument("--requests", type=Path, metavar="FILE", help="judgements that --record wrote")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the judgements there, without any text")
    parser.add_argument("--candidates", type=int, default=500, metavar="N", help="candidates of each quality")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the drawing of requests and signs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    if arguments.requests is not None:
        pairs = read_pairs(arguments.requests)
    else:
        file = Path(arguments.buffer) if arguments.buffer else newest_buffer(config.home_path)
        pairs = pairs_of_buffer(file)
    if arguments.record is not None:
        arguments.record.write_text(
            "\n".join(json.dumps(asdict(pair), separators=(",", ":")) for pair in pairs) + "\n", encoding="utf-8"
        )
    if len(pairs) < config.gate.min_requests:
        problem = f"{len(pairs)} requests were judged with a trained version and the base"
        raise ConfigError("--buffer", problem, f"gate.min_requests is {config.gate.min_requests}: serve longer.")
    rows = list(measure(pairs, config.gate, candidates=arguments.candidates, seed=arguments.seed))
    if arguments.json is not None:
        write_json(arguments.json, {"rows": [asdict(row) for row in rows], "about": about(asdict(config.gate))})
    Console(highlight=False).print(_table(rows, len(pairs), config.gate))
    return 0


def measure(pairs: Sequence[PairedRequest], config: GateConfig, *, candidates: int, seed: int) -> Iterator[Row]:
    """False promotions (gain 0) and power, for attempts of several sizes."""
    for size in sorted({min(times * config.min_requests, len(pairs)) for times in _SIZES}):
        for gain in GAINS:
            rng = np.random.default_rng((seed, size, round(1000 * gain)))
            decisions = [
                Gate(config, number).decide(*candidate(pairs, rng, size, gain)) for number in range(candidates)
            ]
            promoted = [decision.promote for decision in decisions]
            runs = [any(promoted[first : first + IN_A_ROW]) for first in range(0, candidates, IN_A_ROW)]
            by_alpha = sum(decision.gain.low > 0 for decision in decisions)
            yield Row(size, gain, candidates, sum(promoted), by_alpha, (sum(runs), len(runs)))


def candidate(
    pairs: Sequence[PairedRequest], rng: np.random.Generator, size: int, gain: float
) -> tuple[list[Judged], list[Judged]]:
    """A candidate that is `gain` better in alpha, and its champion, on requests drawn from `pairs`."""
    mine, theirs = [], []
    for place in rng.choice(len(pairs), size, replace=False):
        pair = pairs[place]
        sides = (pair.live, pair.static) if rng.random() < 0.5 else (pair.static, pair.live)
        mine.append(_judged(pair, place, better(sides[0], pair.gamma, gain)))
        theirs.append(_judged(pair, place, sides[1]))
    return mine, theirs


def better(side: Side, gamma: int, gain: float) -> Side:
    """The same request with drafts that are accepted more often: fewer rounds make its tokens, so fewer are tested."""
    if not gain or not side.tested:
        return side
    alpha = side.accepted / side.tested
    raised = min(alpha + gain, 1.0)
    rounds = expected_tokens(alpha, gamma) / expected_tokens(raised, gamma)
    tested = side.tested * rounds * expected_tokens(raised, gamma - 1) / expected_tokens(alpha, gamma - 1)
    return replace(side, accepted=raised * tested, tested=tested)


def pairs_of_buffer(file: Path) -> list[PairedRequest]:
    """Requests that were judged with a trained version and with the base. Raises ConfigError."""
    sql = (
        "SELECT domain, gamma, positions, live_expected_accepted, live_expected_tested, static_expected_accepted, "
        "static_expected_tested FROM ledger WHERE positions > 0 AND NOT seeded AND version NOT IN ('', 'base') "
        "ORDER BY ord"
    )
    try:
        with reading(file) as connection:
            rows = [tuple(row) for row in connection.execute(sql)]
    except sqlite3.Error as error:
        raise ConfigError("--buffer", f"{file} is no learner's buffer ({error})", "Name a buffer.sqlite.") from error
    return [PairedRequest(row[0], row[1], row[2], _side(row[3:5]), _side(row[5:7])) for row in rows]


def read_pairs(file: Path) -> list[PairedRequest]:
    """Raises ConfigError for a file that is none of ours."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [
            PairedRequest(**{**line, "live": Side(**line["live"]), "static": Side(**line["static"])}) for line in lines
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError("--requests", f"{file} holds no judgements ({error})", "Write one with --record.") from error


def _side(row: Sequence[float]) -> Side:
    return Side(round(row[0], 2), round(row[1], 2))


def _judged(pair: PairedRequest, place: int, side: Side) -> Judged:
    """A round commits its accepted drafts and one token more."""
    steps = pair.positions - side.accepted
    return Judged(str(place), pair.domain, False, pair.positions, 0.0, side.accepted, side.tested, steps)


def _table(rows: Sequence[Row], pairs: int, config: GateConfig) -> Table:
    title = f"The gate at {config.confidence:.0%} confidence, from {pairs} real paired requests"
    table = Table(title=title, title_justify="left")
    for column in ("requests", "true gain in α", "promoted", "on α alone", f"any in {IN_A_ROW} attempts"):
        table.add_column(column, justify="right")
    for row in rows:
        shares = [row.promoted / row.candidates, row.by_alpha / row.candidates, row.in_a_row[0] / row.in_a_row[1]]
        table.add_row(str(row.requests), f"{row.gain:+.2f}", *(f"{share:.1%}" for share in shares))
    return table
