"""Runs an engine over a list of requests in this thread, without HTTP or Ray: for distilling, measuring and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from serving.drafters.base import Drafter
from serving.engine.engine import Engine, Limits, Tracing
from serving.engine.events import Ending, Event
from serving.engine.request import GenerationRequest
from serving.engine.sequence import Sequence
from serving.spec.gamma import GammaController
from shared.models.paged import PagedModel


class Answer:
    """What one request got."""

    def __init__(self, sequence: Sequence, ending: Ending, text: str) -> None:
        self.request, self.ending, self.text = sequence.request, ending, text
        self.token_ids = tuple(sequence.tokens[sequence.prompt_len :])


class BatchRunner:
    """An engine that is stepped until every request has ended."""

    def __init__(
        self,
        target: PagedModel,
        drafter: Drafter | None,
        controller: GammaController,
        limits: Limits,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = Engine(target, drafter, controller, limits, self._listen, tracing)
        self._text: dict[str, list[str]] = {}
        self._done: list[Answer] = []

    def run(
        self, requests: Iterable[GenerationRequest | None], *, between: Callable[[Engine], None] | None = None
    ) -> Iterator[Answer]:
        """Answers in order of ending. `between` is called after each step, where a swap is allowed.

        A None among the requests says that the next one has not arrived yet: a step is made, then it is asked again.
        """
        feed = iter(requests)
        more = True
        while more or not self.engine.idle:
            while more and len(self.engine.scheduler.waiting) < self.engine.limits.max_batch:
                try:
                    request = next(feed)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    break
                self.engine.check(request)
                self._text[request.id] = []
                self.engine.add(request)
            self.engine.step()
            if between is not None:
                between(self.engine)
            done, self._done = self._done, []
            yield from done

    def _listen(self, sequence: Sequence, event: Event) -> None:
        if isinstance(event, Ending):
            self._done.append(Answer(sequence, event, "".join(self._text.pop(sequence.id))))
        else:
            self._text[sequence.id].append(event.text)
