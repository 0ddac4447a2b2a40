"""A trace holds p after the request's own processing, raw top-k beside it, and says when masks shaped p."""

from __future__ import annotations

import pytest
import torch

from serving.engine.engine import Tracing
from shared.sampling import filtered_probs
from shared.trace import TraceRecord, decode, encode
from tests.laws.mixtures import mixed_requests
from tests.oracle import Reference
from tests.tiny_engine import Bench, GammaByDomain, serve


def test_traces_hold_the_distributions_that_tokens_came_from(bench: Bench) -> None:
    asked, records = mixed_requests(bench.vocab, 36), {}

    def keep(record: TraceRecord, _: torch.Tensor | None) -> None:
        records[record.id] = decode(encode(record))

    target, reference = bench.target(), Reference(bench)
    tracing = Tracing(keep, "replica", 4, 1.0, lambda _: False)
    serve(target, bench.drafter("model", target), asked, GammaByDomain(), tracing=tracing)
    for r in asked:
        record, sampling = records[r.id], r.params.sampling
        assert record.sampling.constrained == (r.params.grammar is not None or r.params.min_tokens > 0)
        assert record.sampling.logit_bias == sampling.logit_bias
        output = record.output_ids.tolist()
        raw = bench.dense_logits([*r.prompt_ids, *output])[len(r.prompt_ids) - 1 : -1]
        for place, token in enumerate(output):
            row = reference.row(raw[place], r, output[:place])
            p = filtered_probs(row[None], sampling)[0, token]
            assert record.probs[place] == pytest.approx(float(p), abs=2e-4), (r, place)
        assert record.topk_positions.tolist() == list(range(len(output)))
        assert (record.topk_ids[:, 0] == raw.argmax(-1).numpy()).all(), "raw: before any processing"
