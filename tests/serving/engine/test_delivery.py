"""What reaches the client: tokens and log-probabilities cut where the text is cut, endings, deadlines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count

import pytest
import torch

from serving.engine.engine import Engine, Limits
from serving.engine.events import Delta, Ending, Event
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence as Running
from shared.errors import RequestError
from shared.trace import Sampling
from tests.fakes_drafters import PlaybackDrafter
from tests.fakes_target import TokenTarget, greedy_answer, random_logits
from tests.tiny import END_ID
from tests.tiny_engine import fixed_gamma, request

PROMPT = (7, 8, 9)


class Heard:
    """An engine over a scripted target with perfect drafts, and everything that it says."""

    def __init__(self, answer: Sequence[int] | None = None, *, gamma: int = 3, prefill: int = 64, **sizes: int) -> None:
        def logits(text: Sequence[int]) -> torch.Tensor:
            place = len(text) - len(PROMPT)
            wanted = answer[place] if answer and place < len(answer) else 3
            return torch.zeros(16).index_fill(0, torch.tensor(wanted), 9.0)

        target = TokenTarget(logits=logits if answer else random_logits, **sizes)
        self.events: list[Event] = []
        self.drafter = PlaybackDrafter({"r": list(answer or greedy_answer(PROMPT, 60))})
        limits = Limits(max_context=200, max_batch=4, prefill_tokens=prefill)
        self.engine = Engine(target, self.drafter, fixed_gamma(gamma), limits, self._hear)  # type: ignore[arg-type]

    def _hear(self, sequence: Running, event: Event) -> None:
        if sequence.id == "r":
            self.events.append(event)

    def run(self, *asked: GenerationRequest) -> Heard:
        for r in asked:
            self.engine.check(r)
            self.engine.add(r)
        for _ in range(500):
            if self.engine.idle:
                return self
            self.engine.step()
        raise AssertionError("no end")

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def ending(self) -> Ending:
        (ending,) = [event for event in self.events if isinstance(event, Ending)]
        return ending


@pytest.mark.parametrize("gamma", [0, 1, 3, 4])
@pytest.mark.parametrize("at", range(1, 8))
def test_tokens_that_a_stop_string_takes_back_whole_are_not_delivered(gamma: int, at: int) -> None:
    """The stop string begins within token `at` and ends two tokens later."""
    answer = [4 + i % 9 for i in range(30)]
    decode = TokenTarget().loaded.tokenizer.decode
    before, whole = decode(answer[: at + 1]), decode(answer[: at + 3])
    heard = Heard(answer, gamma=gamma).run(
        request("r", PROMPT, max_tokens=25, stop=(whole[len(before) - 1 :],), logprobs=1)
    )
    assert heard.text == before[:-1]
    assert heard.tokens == answer[: at + 1]  # something of token `at` is shown; of the next two nothing is
    assert [entry.token_id for delta in heard.deltas for entry in delta.logprobs] == heard.tokens
    assert (heard.ending.reason, heard.ending.stop_reason) == ("stop", whole[len(before) - 1 :])
    assert heard.ending.completion_tokens == at + 3  # the target said them, and they are billed


def test_no_delta_shows_text_without_its_tokens() -> None:
    answer = [4 + i % 9 for i in range(30)]
    heard = Heard(answer).run(request("r", PROMPT, max_tokens=20, stop=("w1 w2 w3", "w9w")))
    decode = TokenTarget().loaded.tokenizer.decode
    said: list[int] = []
    text = ""
    for delta in heard.deltas:
        said += delta.token_ids
        text += delta.text
        assert decode(said).startswith(text)
    assert said == answer[: len(said)]


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_stop_id_ends_the_request_and_is_not_text(gamma: int) -> None:
    answer = [4, 5, 6, 11, 7, 8]
    heard = Heard(answer, gamma=gamma).run(request("r", PROMPT, max_tokens=6, stop_token_ids=(11, 12)))
    assert heard.tokens == answer[:4]
    assert heard.text == TokenTarget().loaded.tokenizer.decode(answer[:3])
    assert (heard.ending.reason, heard.ending.stop_reason) == ("stop", 11)
    ended = Heard([4, END_ID, 5]).run(request("r", PROMPT, max_tokens=6, ignore_eos=False))
    assert (ended.ending.reason, ended.ending.stop_reason) == ("stop", None)
    named = Heard([4, END_ID, 5]).run(request("r", PROMPT, max_tokens=6, stop_token_ids=(END_ID,)))
    assert (named.ending.reason, named.ending.stop_reason) == ("stop", END_ID)


def test_stop_strings_count_from_the_first_token_that_may_be_the_last() -> None:
    answer = [4, 5, 4, 5, 4, 5, 6]
    word = TokenTarget().loaded.tokenizer.decode([4])
    heard = Heard(answer).run(request("r", PROMPT, max_tokens=7, stop=(word,), min_tokens=3))
    assert heard.ending.completion_tokens == 5
    assert heard.text.strip() == TokenTarget().loaded.tokenizer.decode(answer[:4])


@pytest.mark.parametrize("gamma", [0, 3])
def test_log_probabilities_are_the_targets_own_and_finite(gamma: int) -> None:
    sampling = Sampling(temperature=0.3, top_k=2, logit_bias=((5, 4.0),), presence_penalty=1.0, seeded=True)
    asked = request("r", PROMPT, sampling, seed=9, max_tokens=12, logprobs=3, prompt_logprobs=20)
    heard = Heard(gamma=gamma).run(asked)
    entries = [entry for delta in heard.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == heard.tokens
    text = list(PROMPT)
    for entry in entries:
        raw = random_logits(text).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(raw[entry.token_id]), abs=1e-5)
        assert [id for id, _ in entry.top] == raw.topk(3).indices.tolist()
        text.append(entry.token_id)
    json.dumps([asdict(entry) for entry in entries], allow_nan=False)


@pytest.mark.parametrize("prefill", [3, 5, 64])
def test_log_probabilities_of_the_prompt_come_in_any_pieces(prefill: int) -> None:
    """A second request with the same prompt, whose blocks are shared, and one that is put back, get them too."""
    prompt = [3 + i % 12 for i in range(23)]
    asked = [request(id, prompt, max_tokens=20, prompt_logprobs=2) for id in ("a", "b", "r")]
    heard = Heard(prefill=prefill, blocks=24).run(*asked)
    none, *entries = heard.ending.prompt_logprobs
    assert none is None
    assert [entry.token_id for entry in entries if entry] == prompt[1:]
    for place, entry in enumerate(entries, 1):
        assert entry is not None
        raw = random_logits(prompt[:place]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(raw[entry.token_id]), abs=1e-5)
        assert [id for id, _ in entry.top] == raw.topk(2).indices.tolist()
    assert Heard().run(request("r", [5], max_tokens=2, prompt_logprobs=0)).ending.prompt_logprobs == (None,)
    assert Heard().run(request("r", prompt, max_tokens=2)).ending.prompt_logprobs == ()


def test_padding_is_no_alternative() -> None:
    def logits(_: Sequence[int]) -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 3.0, *[-math.inf] * 13])

    heard = Heard()
    heard.engine.target._logits = logits  # type: ignore[attr-defined]
    heard.run(request("r", PROMPT, max_tokens=2, logprobs=20))
    assert all(len(entry.top) == 3 for delta in heard.deltas for entry in delta.logprobs)


def test_a_deadline_ends_with_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves a second at each look; held text and tokens come out before the ending."""
    clock = count()
    monkeypatch.setattr("serving.engine.sequence.time.monotonic", lambda: float(next(clock)))
    answer = [4, 5, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5]
    stop = TokenTarget().loaded.tokenizer.decode([4, 5] * 9)  # the whole answer might become it
    heard = Heard(answer, gamma=0).run(request("r", PROMPT, max_tokens=12, stop=(stop,), deadline_s=4.0))
    assert heard.ending.reason == "deadline"
    assert "deadline of 4 s" in heard.ending.message
    assert 0 < heard.ending.completion_tokens < 12
    assert heard.tokens == answer[: heard.ending.completion_tokens]
    assert heard.text == TokenTarget().loaded.tokenizer.decode(heard.tokens)
    assert heard.engine.allocator.free == heard.engine.allocator.num_blocks


@pytest.mark.parametrize(
    ("param", "sampling", "more"),
    [
        ("logprobs", {}, {"logprobs": 21}),
        ("prompt_logprobs", {}, {"prompt_logprobs": -1}),
        ("min_tokens", {}, {"min_tokens": 41}),
        ("stop_token_ids", {}, {"stop_token_ids": (16,)}),
        ("logit_bias", {"logit_bias": ((16, 1.0),)}, {}),
        ("logit_bias", {"logit_bias": ((3, math.inf),)}, {}),
        ("logit_bias", {"logit_bias": ((3, 1.0), (3, 2.0))}, {}),
        ("repetition_penalty", {"repetition_penalty": 0.0}, {}),
        ("repetition_penalty", {"repetition_penalty": 1e-40}, {}),  # a logit of 1 divided by it is infinite
        ("presence_penalty", {"presence_penalty": math.nan}, {}),
        ("deadline_s", {}, {"deadline_s": 0.0}),
    ],
)
def test_what_cannot_be_honoured_is_refused(param: str, sampling: dict[str, object], more: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        Heard().engine.check(request("r", PROMPT, Sampling(**sampling), **more))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert param in str(caught.value).replace("the deadline", "deadline_s")
