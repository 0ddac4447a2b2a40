"""Each prompt is sent once, phases end by time or for want of prompts, and a drift is a domain that came later."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.demo_plan import DRIFTS, WARM_UP, Feed, Phase, Plan, Prompt, built_in_plan, plan_of_rows
from ops.traffic_file import read_traffic


def _plan(**counts: int) -> Plan:
    phases = [
        Phase(name, 1 / len(counts), tuple(Prompt(name, ({"role": "user", "content": f"{n}"},)) for n in range(count)))
        for name, count in counts.items()
    ]
    return Plan(tuple(phases), tuple(counts)[1:])


def _domains(feed: Feed, *times: float) -> list[str | None]:
    return [prompt.domain if (prompt := feed.next(at)) else None for at in times]


def test_phases_follow_each_other_by_time() -> None:
    feed = Feed(_plan(a=100, b=100), 20)  # ten seconds each
    assert _domains(feed, 0, 9.9, 10.1, 19.9, 20.1, 21) == ["a", "a", "b", "b", None, None]
    assert feed.phase is None


def test_a_phase_without_prompts_left_ends_early_and_the_next_takes_no_longer() -> None:
    feed = Feed(_plan(a=2, b=100), 20)
    assert _domains(feed, 0, 1, 2) == ["a", "a", "b"]
    assert _domains(feed, 11.9, 12.1) == ["b", None]  # b began at 2 and has ten seconds


def test_a_late_question_does_not_lengthen_the_run() -> None:
    feed = Feed(_plan(a=100, b=100), 20)
    assert _domains(feed, 0, 19, 20.1) == ["a", "b", None]


def test_a_phase_that_passed_unasked_is_skipped() -> None:
    feed = Feed(_plan(a=9, b=9, c=9), 30)
    assert _domains(feed, 0, 25) == ["a", "c"]


def test_no_prompt_comes_twice() -> None:
    feed = Feed(_plan(a=5, b=5), 1000)
    texts = []
    while (prompt := feed.next(0)) is not None:
        texts.append((prompt.domain, prompt.messages[0]["content"]))
    assert len(texts) == len(set(texts)) == 10  # of both phases


def test_the_built_in_plan() -> None:
    plan = built_in_plan(seed=3)
    warm_up, *drifts = plan.phases
    assert [prompt.domain for prompt in warm_up.prompts[:6]] == [*WARM_UP, *WARM_UP]
    assert [phase.name for phase in drifts] == list(plan.drifted) == list(DRIFTS)
    assert all({prompt.domain for prompt in phase.prompts} == {phase.name} for phase in drifts)
    assert sum(phase.share for phase in plan.phases) == pytest.approx(1)
    texts = [prompt.messages[0]["content"] for phase in plan.phases for prompt in phase.prompts]
    assert len(set(texts)) == len(texts)
    assert plan == built_in_plan(seed=3)
    assert plan.phases[0].prompts != built_in_plan(seed=4).phases[0].prompts


def test_a_file_keeps_its_order_and_late_domains_are_drifts(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    domains = ["old", "old", *["old"] * 8, "new one", "old", *["later"] * 8]  # the first tenth is two rows
    file.write_text("\n".join(f'{{"prompt": "p{n}", "domain": "{domain}"}}' for n, domain in enumerate(domains)))
    plan = plan_of_rows(read_traffic(file))
    (phase,) = plan.phases
    assert [prompt.messages[0]["content"] for prompt in phase.prompts] == [f"p{n}" for n in range(20)]
    assert phase.prompts[10].domain == "new_one"  # as the API takes it
    assert plan.drifted == ("new_one", "later")


def test_a_file_of_one_domain_has_no_drift(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert plan_of_rows(read_traffic(file)).drifted == ()
