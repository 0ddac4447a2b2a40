"""What a trace says of each position is what the dense reference says, whatever happened on the way there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.engine.engine import Tracing
from serving.engine.request import GenerationRequest
from shared.sampling import filtered_probs
from shared.trace import Kind, Sampling, TraceRecord, decode, encode
from tests.tiny_engine import FEATURE_LAYERS, Bench, fixed_gamma, outputs, request, serve

TOPK, SHARE = 5, 0.25
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9), Sampling(top_k=12, seeded=True))
Served = dict[str, tuple[GenerationRequest, TraceRecord, Tensor | None]]


@pytest.fixture(scope="module", params=["eagle3", "none"])
def served(request: pytest.FixtureRequest, bench: Bench) -> Served:
    """Long and short prompts, chunked, drafted, and put back for want of blocks; every second one with features."""
    return run(bench, request.param)


def run(bench: Bench, kind: str) -> Served:
    target = bench.target(blocks=20, block_size=8)
    noise = torch.Generator().manual_seed(2)
    asked = {
        f"r{i}": request(
            f"r{i}",
            torch.randint(3, 320, (3 + 8 * i,), generator=noise).tolist(),
            SAMPLINGS[i % 3],
            seed=5 if i % 3 == 2 else None,
            max_tokens=45,
        )
        for i in range(6)
    }
    found: Served = {}

    def sink(record: TraceRecord, features: Tensor | None) -> None:
        found[record.id] = (asked[record.id], record, features)

    tracing = Tracing(sink, "replica-1", TOPK, SHARE, lambda r: r.id in ("r0", "r2", "r4", "r5"))
    _, engine = serve(
        target,
        bench.drafter(kind, target),
        asked.values(),
        fixed_gamma(3),
        prefill_tokens=16,
        max_batch=5,
        tracing=tracing,
    )
    assert engine.scheduler.preemptions > 0, "the blocks were meant to be too few"
    return found


def reference(bench: Bench, record: TraceRecord) -> Tensor:  # [n, vocab] raw logits of the committed positions
    text = [*record.prompt_ids.tolist(), *record.output_ids.tolist()]
    return bench.dense_logits(text)[len(record.prompt_ids) - 1 : -1]


def test_probabilities_are_the_targets_after_the_requests_filters(bench: Bench, served: Served) -> None:
    for asked, record, _ in served.values():
        p = filtered_probs(reference(bench, record), asked.params.sampling)
        expected = p.gather(1, torch.from_numpy(record.output_ids).long()[:, None]).squeeze(1)
        torch.testing.assert_close(torch.from_numpy(record.probs), expected, rtol=1e-3, atol=1e-5)
        assert (record.probs > 0).all()


def test_top_k_is_raw_at_a_share_of_positions_and_at_every_rejection(bench: Bench, served: Served) -> None:
    for _, record, _ in served.values():
        positions = record.topk_positions.tolist()
        assert positions == sorted(set(positions))
        recovered = np.flatnonzero(record.kinds == Kind.RECOVERED).tolist()
        assert set(recovered) <= set(positions)
        spread = [t for t in range(45) if int((t + 1) * SHARE) > int(t * SHARE)]
        assert set(positions) == set(recovered) | set(spread)
        logits = reference(bench, record)[positions]
        values, ids = logits.topk(TOPK)
        assert (torch.from_numpy(record.topk_ids).long() == ids).float().mean() > 0.99  # ties may trade places
        lse = logits.logsumexp(-1)
        torch.testing.assert_close(torch.from_numpy(record.topk_lse), lse, rtol=1e-4, atol=1e-4)
        stored = torch.from_numpy(record.topk_logprobs).float()
        torch.testing.assert_close(stored, values - lse[:, None], rtol=2e-3, atol=2e-3)  # float16


def test_features_are_the_layers_outputs_of_the_committed_text(bench: Bench, served: Served) -> None:
    for id, (_, record, features) in served.items():
        if id not in ("r0", "r2", "r4", "r5"):
            assert features is None
            assert not record.has_features
            continue
        assert features is not None
        assert record.has_features
        text = torch.tensor([[*record.prompt_ids.tolist(), *record.output_ids.tolist()]])
        with torch.inference_mode():
            expected = torch.cat(outputs(bench.reference, text, FEATURE_LAYERS), dim=-1)[0, :-1]
        assert features.dtype == torch.float16
        assert features.shape == expected.shape == (len(record.prompt_ids) + len(record.output_ids) - 1, 64)
        torch.testing.assert_close(features.float(), expected, rtol=2e-3, atol=2e-3)


def test_the_record_survives_the_wire(served: Served) -> None:
    for asked, record, _ in served.values():
        again = decode(encode(record))
        assert (again.id, again.domain, again.replica, again.target) == (
            asked.id,
            "default",
            "replica-1",
            record.target,
        )
        assert again.sampling == asked.params.sampling
        for name in ("prompt_ids", "output_ids", "kinds", "probs", "topk_ids", "topk_logprobs", "rejected"):
            np.testing.assert_array_equal(getattr(again, name), getattr(record, name))
