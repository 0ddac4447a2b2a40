"""When an attempt is made, by every reason there is, and when it is given up."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from learner.lookout import LEAST_TOKENS, NEW_TOKENS, Lookout
from learner.schedule import KILLS, PATIENCE, REFUSALS, REST, Progress, Situation, plan_attempt, tried_in_vain

LEAST = 1000
QUIET = Situation(fresh={"sql": LEAST}, drifted=(), lagging=(), last="refused", refusals=0, tried=("sql",))


@pytest.mark.parametrize(
    ("change", "focus", "reason"),
    [
        ({"drifted": ("sql",), "lagging": ("german",)}, ("sql", "german"), "fallen in sql"),
        ({"lagging": ("german",), "fresh": {"german": LEAST}}, ("german",), "german is new"),
        ({"last": "promoted", "refusals": 0}, (), "promoted"),
    ],
)
def test_every_reason_needs_the_usual_tokens_and_no_more(change: dict, focus: tuple, reason: str) -> None:  # type: ignore[type-arg]
    situation = replace(QUIET, **change)
    plan = plan_attempt(situation, LEAST)
    assert (plan.attempt, plan.focus) == (True, focus)
    assert reason in plan.reason
    scarce = {domain: tokens - 1 for domain, tokens in situation.fresh.items()}
    assert not plan_attempt(replace(situation, fresh=scarce), LEAST).attempt


def test_without_a_reason_it_takes_eight_times_the_tokens() -> None:
    for last in ("none", "refused", "undecided"):
        situation = replace(QUIET, last=last, fresh={"sql": PATIENCE * LEAST - 1})  # type: ignore[arg-type]
        waiting = plan_attempt(situation, LEAST)
        assert not waiting.attempt
        assert f"{PATIENCE * LEAST}" in waiting.reason
        assert plan_attempt(replace(situation, fresh={"sql": PATIENCE * LEAST}), LEAST).attempt


@pytest.mark.parametrize("refusals", [1, 2])
def test_each_refusal_doubles_what_the_next_attempt_on_the_same_domain_waits_for(refusals: int) -> None:
    again = replace(QUIET, lagging=("sql",), refusals=refusals, fresh={"sql": 2**refusals * LEAST - 1})
    assert not plan_attempt(again, LEAST).attempt
    assert plan_attempt(replace(again, fresh={"sql": 2**refusals * LEAST}), LEAST).attempt


def test_three_refusals_in_a_row_end_the_effort_until_another_domain_drifts_or_much_has_come() -> None:
    stopped = replace(QUIET, lagging=("sql",), refusals=REFUSALS)
    assert not plan_attempt(stopped, LEAST).attempt
    assert plan_attempt(replace(stopped, drifted=("german",), fresh={"german": LEAST}), LEAST).attempt
    assert plan_attempt(replace(stopped, fresh={"sql": PATIENCE * LEAST}), LEAST).attempt


def test_where_nothing_is_gained_pauses_grow_until_learning_has_come_to_rest() -> None:
    def pause(refusals: int) -> int:
        """Tokens that an attempt without a drift waits for."""
        stopped = replace(QUIET, last="refused", refusals=refusals, fresh={})
        return next(n for n in range(2**20) if plan_attempt(replace(stopped, fresh={"sql": n * LEAST}), LEAST).attempt)

    pauses = [pause(refusals) for refusals in range(REFUSALS, REFUSALS + 9)]
    assert pauses[:7] == [PATIENCE * 2**n for n in range(7)]
    assert set(pauses[6:]) == {PATIENCE * REST}, "and a change of the traffic that is no drift is noticed in the end"
    drifted = replace(QUIET, last="refused", refusals=REFUSALS + 8, drifted=("german",), fresh={"german": LEAST})
    assert plan_attempt(drifted, LEAST).attempt, "a drift of another domain does not wait"


def test_only_tokens_of_the_domains_in_question_count() -> None:
    drifting = replace(QUIET, drifted=("sql",), fresh={"chat": 9 * LEAST, "sql": LEAST - 1})
    assert not plan_attempt(drifting, LEAST).attempt
    assert plan_attempt(replace(drifting, fresh={"chat": 0, "sql": LEAST}), LEAST).attempt


def test_a_drift_beside_a_lagging_domain_does_not_hide_it() -> None:
    both = replace(QUIET, drifted=("sql",), lagging=("german", "sql"))
    assert plan_attempt(both, LEAST).focus == ("sql", "german")


def test_another_domain_begins_with_a_clean_slate() -> None:
    stuck = Progress().begun(("sql",)).ended("refused", 10, "kept").begun(("sql",)).ended("refused", 20, "kept")
    assert (stuck.refusals, stuck.tried) == (2, ("sql",))
    assert (stuck.begun(("sql", "german")).refusals, stuck.begun(("sql", "german")).tried) == (0, ("sql", "german"))
    assert Progress.kept({**asdict(stuck), "tried": ["sql"]}) == stuck


def test_progress_counts_refusals_in_a_row_and_makes_an_interrupted_attempt_again() -> None:
    once = Progress().begun().ended("refused", 10, "kept")
    assert (once.attempts, once.refusals, once.trained_to, once.running) == (1, 1, 10, False)
    killed = once.begun(("sql",)).resumed()
    assert (killed.attempts, killed.refusals, killed.running) == (2, 0, True), "it is made again, and is the same one"
    assert killed.begun(("german",)) == killed
    assert killed.focus == ("sql",)
    assert Progress.kept({**asdict(killed), "focus": ["sql"], "tried": ["sql"]}) == killed
    for _ in range(KILLS - 2):
        killed = killed.resumed()
    given_up = killed.resumed()
    assert (given_up.running, given_up.refusals, given_up.trained_to) == (False, 1, 10)
    assert f"killed {KILLS} times" in given_up.decision
    assert given_up.resumed() == given_up
    assert given_up.begun(("sql",)).kills == 0
    in_vain = given_up
    for _ in range(REFUSALS - 1):
        assert not tried_in_vain(in_vain)
        in_vain = in_vain.begun(("sql",)).ended("refused", 20, "kept")
    assert tried_in_vain(in_vain)
    open_still = once.begun().ended("undecided", 20, "kept: nobody came")
    assert (open_still.refusals, open_still.last, open_still.trained_to) == (1, "undecided", 20)
    promoted = once.begun().ended("promoted", 30, "promoted")
    assert (promoted.promotions, promoted.refusals, promoted.attempts) == (1, 0, 2)
    assert not tried_in_vain(promoted)


def test_a_new_domain_lags_only_against_established_ones_and_only_while_it_is_new() -> None:
    lookout = Lookout()
    lookout.update("german", 0.1 * LEAST_TOKENS, int(LEAST_TOKENS))
    assert lookout.lagging() == ()
    lookout.update("chat", 0.5 * NEW_TOKENS, int(NEW_TOKENS))
    assert lookout.lagging() == ("german",)
    lookout.update("maths", 0.48 * LEAST_TOKENS, int(LEAST_TOKENS))
    assert lookout.lagging() == ("german",)
    lookout.update("german", 0.1 * NEW_TOKENS, int(NEW_TOKENS))
    assert lookout.lagging() == ()


def test_a_restart_sees_what_was_seen_before_it() -> None:
    history = [(i, "chat", 50.0, 100) for i in range(30)] + [(i, "chat", 10.0, 100) for i in range(30, 40)]
    live = Lookout()
    for _, domain, accepted, positions in history:
        live.update(domain, accepted, positions)
    assert live.drifted() == ("chat",)
    assert Lookout.rebuild(history, {}).scores() == live.scores()
    live.settle("chat")
    assert live.drifted() == ()
    for order in range(40, 43):
        live.update("chat", 10.0, 100)
        history.append((order, "chat", 10.0, 100))
    assert Lookout.rebuild(history, {"chat": 39}).scores() == live.scores()
    assert Lookout.rebuild(history, {"chat": 42}).drifted() == ()
