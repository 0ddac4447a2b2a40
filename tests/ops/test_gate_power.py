"""Candidates of a known quality from real judgements: equal ones are as good as their champion, shifted ones better."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from learner.gate import Gate
from ops import cli
from ops.gate_power import IN_A_ROW, PairedRequest, Side, better, candidate, measure, read_pairs
from shared.acceptance import expected_tokens
from shared.config import GateConfig

CONFIG = GateConfig(resamples=200)
SHIPPED = Path(__file__).parents[2] / "docs" / "judgements.jsonl"


@pytest.fixture(scope="module")
def pairs() -> list[PairedRequest]:
    return read_pairs(SHIPPED)


def test_equal_candidates_are_distinct_and_on_average_no_better(pairs: list[PairedRequest]) -> None:
    rng = np.random.default_rng(0)
    made = [candidate(pairs, rng, 128, 0.0) for _ in range(200)]
    assert len({tuple(j.accepted for j in mine) for mine, _ in made}) == 200
    gains = [Gate(CONFIG).decide(*pair).gain.value for pair in made]
    # Within three standard errors of the mean over 200 candidates.
    assert abs(np.mean(gains)) < 3 * np.std(gains) / 200**0.5


@pytest.mark.parametrize("gain", [0.02, 0.05])
def test_a_shift_is_the_gain_that_it_says(pairs: list[PairedRequest], gain: float) -> None:
    rng = np.random.default_rng(1)
    found = np.mean([Gate(CONFIG).decide(*candidate(pairs, rng, 128, gain)).gain.value for _ in range(100)])
    # A request that has all its drafts accepted gains nothing, so the mean is a little lower; chance is about 0.002.
    assert found == pytest.approx(gain, abs=0.007)


def test_more_accepted_drafts_are_fewer_rounds_for_the_same_tokens() -> None:
    alpha, gamma, rounds = 0.4, 3, 30.0
    tested = rounds * expected_tokens(alpha, gamma - 1)  # a round reaches its next draft with chance alpha
    side = better(Side(alpha * tested, tested), gamma, 0.1)
    assert side.accepted / side.tested == pytest.approx(0.5)
    fewer = rounds * expected_tokens(alpha, gamma) / expected_tokens(0.5, gamma)
    assert side.tested == pytest.approx(fewer * expected_tokens(0.5, gamma - 1))
    assert better(side, gamma, 0.0) == side
    assert better(Side(0.0, 0.0), gamma, 0.1) == Side(0.0, 0.0)


def test_what_is_measured_is_what_the_gate_promises(pairs: list[PairedRequest]) -> None:
    rows = list(measure(pairs, CONFIG, candidates=200, seed=2))
    assert [(row.requests, row.gain) for row in rows] == [(n, g) for n in (16, 48, 128) for g in (0.0, 0.02, 0.05)]
    for row in rows:
        if row.gain == 0:
            # 5 % and three standard errors of a share over 200 candidates
            assert row.promoted / row.candidates <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
        assert row.in_a_row[1] == 200 // IN_A_ROW
    power = {(row.requests, row.gain): row.promoted / row.candidates for row in rows}
    assert power[128, 0.05] > 0.9
    assert power[16, 0.05] < power[48, 0.05] < power[128, 0.05]


def test_the_command_writes_counts_and_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(SHIPPED.read_text().splitlines(keepends=True)[:20]))
    counts = tmp_path / "counts.json"
    flags = ["--requests", str(few), "--candidates", "10", "--set", "gate.resamples=100", "--json", str(counts)]
    assert cli.run(["gate-power", *flags]) == 0
    assert "20 real paired requests" in capsys.readouterr().out
    report = json.loads(counts.read_text())
    assert {row["candidates"] for row in report["rows"]} == {10}
    assert report["about"]["settings"]["resamples"] == 100
    few.write_text("".join(SHIPPED.read_text().splitlines(keepends=True)[:3]))
    assert cli.run(["gate-power", *flags]) == cli.REFUSED
    few.write_text('{"no": "judgement"}')
    assert cli.run(["gate-power", *flags]) == cli.REFUSED
    assert "--record" in capsys.readouterr().err
