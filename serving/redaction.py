"""Cuts a trace where private text begins, before anything of it leaves the replica.

A redactor says which characters of a request's text are private. Masking their token ids would not be enough: the
target's features and distributions at every later position were computed from them, and name them again. So a trace
ends in front of the first private token, and one whose prompt holds a private token is dropped whole. A redactor that
fails lets nothing through. One thread calls it, off the decode path; what it has no time for is dropped and counted.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from serving.api.logprobs import TokenTexts
from shared.errors import ConfigError
from shared.trace import TraceRecord

Redactor = Callable[[str], Sequence[tuple[int, int]]]  # private spans of a text: (first character, one past the last)
Sink = Callable[[TraceRecord, Tensor | None], None]

_FIELD = "privacy.redactor"
# Bytes that are no text become one character each, so that characters and bytes can be counted against each other.
_SHOWN = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")

log = logging.getLogger(__name__)


def load_redactor(name: str) -> Redactor:
    """The function that `name` ("module:function") stands for, tried once. Raises ConfigError."""
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise ValueError("it is not of the form module:function")
        redactor: Redactor = getattr(importlib.import_module(module), function)
        list(redactor(""))
    except Exception as error:  # a stranger's code
        remedy = "Name a function that takes a text and returns the private spans of it, and install what it needs."
        raise ConfigError(_FIELD, f"{name} cannot be used ({error})", remedy) from error
    return redactor


def first_private(token_ids: Sequence[int], texts: TokenTexts, redactor: Redactor) -> int:
    """Index of the first token with a private character; the number of tokens when there is none.

    Raises whatever the redactor raises, and ValueError for spans that leave the text.
    """
    pieces = [texts.bytes_of(int(token)) for token in token_ids]
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    starts = []
    for start, end in redactor(text.translate(_SHOWN)):
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"the span {start}..{end} leaves the text of {len(text)} characters")
        if start < end:
            starts.append(start)
    if not starts:
        return len(token_ids)
    byte = len(text[: min(starts)].encode("utf-8", "surrogateescape"))
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, byte, side="right"))


def cut(record: TraceRecord, committed: int) -> TraceRecord:
    """The record as if the request had ended after its first `committed` tokens, of which there is at least one."""
    kept, judged = record.topk_positions < committed, record.rejected[:, 0] < committed
    rounds = []
    for round_ in record.rounds:
        drafted = round_.drafted[: max(committed - round_.start, 0)]
        if round_.start < committed:
            reached = len(drafted)
            rounds.append(
                replace(
                    round_,
                    drafted=drafted,
                    accepted=min(round_.accepted, reached),
                    tested=min(round_.tested, reached),
                )
            )
    return replace(
        record,
        output_ids=record.output_ids[:committed],
        kinds=record.kinds[:committed],
        probs=record.probs[:committed],
        rounds=tuple(rounds),
        topk_positions=record.topk_positions[kept],
        topk_ids=record.topk_ids[kept],
        topk_logprobs=record.topk_logprobs[kept],
        topk_lse=record.topk_lse[kept],
        rejected=record.rejected[judged],
        rejected_probs=record.rejected_probs[judged],
    )


class Redaction:
    """Stands in front of `sink` and is called as it is. At most `queue_size` records and `rows` feature rows wait."""

    def __init__(self, redactor: Redactor, texts: TokenTexts, sink: Sink, *, queue_size: int, rows: int) -> None:
        self._redactor, self._texts, self._sink = redactor, texts, sink
        self._queue: queue.Queue[tuple[TraceRecord, Tensor | None] | None] = queue.Queue(queue_size)
        self._most_rows, self._rows, self._lock = rows, 0, threading.Lock()
        self.counters = dict.fromkeys(("redacted_cut", "redacted_whole", "redaction_failed", "redaction_dropped"), 0)
        self._thread = threading.Thread(target=self._run, name="redaction", daemon=True)
        self._thread.start()

    def offer(self, record: TraceRecord, features: Tensor | None) -> None:
        """Called on the stepping thread when a request has ended; never waits."""
        with self._lock:
            if features is not None and self._rows + len(features) > self._most_rows:
                record, features = replace(record, has_features=False), None
            rows = 0 if features is None else len(features)
            try:
                self._queue.put_nowait((record, features))
            except queue.Full:
                self.counters["redaction_dropped"] += 1
                return
            self._rows += rows

    def stop(self) -> None:
        """Redact what is queued, within a few seconds, and end the thread."""
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            record, features = item
            with self._lock:
                self._rows -= 0 if features is None else len(features)
            try:
                self._pass(record, features)
            except Exception:  # a stranger's code: what it could not look at must not leave
                log.exception("%s failed: a trace is dropped", _FIELD)
                self.counters["redaction_failed"] += 1

    def _pass(self, record: TraceRecord, features: Tensor | None) -> None:
        prompt, whole = len(record.prompt_ids), len(record.prompt_ids) + len(record.output_ids)
        end = first_private([*record.prompt_ids.tolist(), *record.output_ids.tolist()], self._texts, self._redactor)
        if end <= prompt:
            self.counters["redacted_whole"] += 1
            return
        if end < whole:
            self.counters["redacted_cut"] += 1
            record = cut(record, end - prompt)
            features = features[: end - 1].clone() if features is not None else None
        self._sink(record, features)
