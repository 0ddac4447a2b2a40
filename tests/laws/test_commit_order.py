"""Law 4: accepted tokens are walked one by one, and nothing behind the one that ends a request exists anywhere.

A playback drafter proposes the answer that the target would give without an end, so that the end lies inside an
accepted run, at every place in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from serving.batch import Answer
from serving.engine.engine import Engine, Tracing
from shared.trace import Kind, Sampling, TraceRecord
from tests.fakes_drafters import PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer, random_logits
from tests.tiny import END_ID
from tests.tiny_engine import fixed_gamma, request, serve

PROMPT = (7, 8, 9)
GAMMA = 4


class Traces(list[TraceRecord]):
    """Collects what the engine hands over."""

    def tracing(self) -> Tracing:
        return Tracing(lambda record, _: self.append(record), "replica", 4, 1.0, lambda _: False)


def scripted(answer: Sequence[int]):  # type: ignore[no-untyped-def]
    """Logits that follow PROMPT with `answer`, then with token 3 for ever."""

    def logits(text: Sequence[int]) -> Tensor:
        place = len(text) - len(PROMPT)
        wanted = answer[place] if place < len(answer) else 3
        return torch.zeros(16).index_fill(0, torch.tensor(wanted), 9.0)

    return logits


def play(
    answer: Sequence[int],
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 30,
    ignore_eos: bool = False,
    sampling: Sampling | None = None,
) -> tuple[Answer, Engine, TraceRecord]:
    """Serve one request whose drafts are all right, up to and beyond its end."""
    traces = Traces()
    drafter = PlaybackDrafter({"r": [*answer, *[3] * 40]})
    asked = request(
        "r", PROMPT, sampling, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos, seed=4 if sampling else None
    )
    answers, engine = serve(
        TokenTarget(logits=scripted(answer)), drafter, [asked], fixed_gamma(GAMMA), tracing=traces.tracing()
    )
    assert len(traces) == 1
    return answers["r"], engine, traces[0]


def check_books(answer: Answer, engine: Engine, trace: TraceRecord, tokens: Sequence[int]) -> None:
    """Every account of the request tells of exactly `tokens`."""
    n, stats, total = len(tokens), answer.ending.stats, engine.counters.total
    assert list(answer.token_ids) == list(tokens)
    assert answer.ending.completion_tokens == n
    assert trace.output_ids.tolist() == list(tokens)
    assert len(trace.kinds) == len(trace.probs) == n
    assert all(position < n for position in (*trace.topk_positions, *(p for p, _ in trace.rejected)))
    assert total("emitted") == n
    kinds = trace.kinds.tolist()
    assert total("accepted") == stats.num_accepted_draft_tokens == kinds.count(Kind.ACCEPTED)
    assert total("accepted") == sum(r.accepted for r in trace.rounds)
    assert total("tested") == stats.tested == sum(r.tested for r in trace.rounds)
    assert total("tested") - total("accepted") == kinds.count(Kind.RECOVERED) == len(trace.rejected)
    assert total("steps") == stats.num_steps == len(trace.rounds)
    assert total("drafted") == stats.num_draft_tokens == sum(len(r.drafted) for r in trace.rounds)
    assert all(r.start + r.accepted <= n for r in trace.rounds)


# The first token comes from the prompt, rounds of 4 drafts and a bonus follow: token 1..4 accepted, 5 bonus, 6..9 ...
@pytest.mark.parametrize("end", range(11))
def test_the_end_token_inside_a_run(end: int) -> None:
    answer = [4 + i % 9 for i in range(end)]
    served, engine, trace = play([*answer, END_ID])
    check_books(served, engine, trace, [*answer, END_ID])
    assert served.ending.reason == "stop"
    assert served.text == engine.target.loaded.tokenizer.decode(answer)
    # The last round tested only what it emitted: up to the end if that was a draft, else all four and the bonus.
    if end:
        last = trace.rounds[-1]
        assert last.tested == last.accepted == min(end - last.start + 1, GAMMA)


@pytest.mark.parametrize("cap", range(1, 12))
def test_the_cap_inside_a_run(cap: int) -> None:
    answer = [4 + i % 9 for i in range(40)]
    served, engine, trace = play(answer, max_tokens=cap)
    check_books(served, engine, trace, answer[:cap])
    assert served.ending.reason == "length"
    # Nobody drafts what there is no room for: a round's drafts and its one more token fit under the cap.
    assert all(r.start + len(r.drafted) + 1 <= cap for r in trace.rounds)


@pytest.mark.parametrize("end", range(2, 10))
def test_a_stop_string_that_spans_tokens_inside_a_run(end: int) -> None:
    answer = [4 + i % 9 for i in range(30)]
    decode = TokenTarget().loaded.tokenizer.decode
    # The stop string begins in the middle of one token's text and ends with the next token.
    stop = decode(answer[: end + 1])[len(decode(answer[: end - 1])) + 2 :]
    assert stop in decode(answer[: end + 1])
    assert stop not in decode(answer[:end])
    served, engine, trace = play(answer, stop=("never", stop))
    check_books(served, engine, trace, answer[: end + 1])
    assert served.ending.reason == "stop"
    text = decode(answer[: end + 1])
    assert served.text == text[: text.index(stop)]


def test_an_ignored_end_is_a_token_like_any_other() -> None:
    answer = [5, END_ID, 6, END_ID, 7]
    served, engine, trace = play(answer, max_tokens=5, ignore_eos=True)
    check_books(served, engine, trace, answer)
    assert served.text == engine.target.loaded.tokenizer.decode(answer)


def test_the_end_wins_over_the_cap_at_the_same_token() -> None:
    served, *_ = play([4, 5, END_ID], max_tokens=3)
    assert served.ending.reason == "stop"


def test_seeded_requests_are_cut_alike() -> None:
    served, engine, trace = play([4, 5, END_ID], sampling=Sampling(temperature=0.1, seeded=True))
    check_books(served, engine, trace, [4, 5, END_ID])


@pytest.mark.parametrize("seed", range(20))
def test_the_books_agree_whatever_is_wrong(seed: int) -> None:
    """Greedy, seeded and sampled requests with drafts that miss here and there, ended by whatever comes first."""
    sampling, number = [(None, None), (Sampling(seeded=True), 7), (Sampling(top_p=0.9), None)][seed % 3]
    drafter = PlaybackDrafter(
        {"r": greedy_answer(PROMPT, 40)}, wrong=lambda position: position % (2 + seed % 5) == seed % 2
    )
    traces = Traces()
    asked = request("r", PROMPT, sampling, seed=number, max_tokens=25, ignore_eos=False, stop=("w1 w2", "w9"))
    answers, engine = serve(TokenTarget(), drafter, [asked], fixed_gamma(3), tracing=traces.tracing())
    served = answers["r"]
    check_books(served, engine, traces[0], served.token_ids)
    # Each step emits its accepted drafts and one more, but for the last one, which may be cut before the one more.
    cut = engine.counters.total("steps") + engine.counters.total("accepted") - len(served.token_ids)
    assert cut in (0, 1)
    assert cut == 0 or served.ending.reason == "stop"
    # What the trace says of each position is what the target's distribution says.
    if sampling is None:
        text = list(PROMPT)
        for token, prob in zip(served.token_ids, traces[0].probs, strict=True):
            assert token == int(random_logits(text).argmax())
            assert prob == 1.0
            text.append(token)
