"""Random traces, features and tiny drafters for the learner's tests; everything follows from the seed."""

from __future__ import annotations

import numpy as np
import torch

from learner.example import Example
from shared.models.eagle3 import Eagle3Config, Eagle3Head
from shared.trace import Kind, Sampling, TraceRecord

VOCAB, TARGET_HIDDEN, FEATURE_LAYERS = 60, 12, (0, 1, 2)


def tiny_head(*, draft_vocab: int = 24, vocab: int = VOCAB, seed: int = 0, spread: float = 0.3) -> Eagle3Head:
    """A random head whose draft vocabulary is every second id; wide weights, so that distributions differ."""
    config = Eagle3Config(
        target_hidden=TARGET_HIDDEN,
        feature_layers=FEATURE_LAYERS,
        hidden=16,
        intermediate=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        draft_vocab=draft_vocab,
    )
    noise = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, torch.randn(vocab, TARGET_HIDDEN, generator=noise))
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=spread, generator=noise)
    head.draft_ids.copy_(torch.arange(draft_vocab) * 2)
    return head


def random_record(
    seed: int,
    *,
    prompt: int = 7,
    outputs: int = 9,
    topk: int = 6,
    vocab: int = VOCAB,
    sampling: Sampling | None = None,
    share: float = 1.0,
    domain: str = "chat",
) -> TraceRecord:
    """Random tokens; the stored top-k are of random distributions at a random share of the positions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(outputs, vocab)) * 2
    lse = np.log(np.exp(logits).sum(1))
    ids = np.argsort(-logits, axis=1)[:, :topk]
    kept = np.flatnonzero(rng.random(outputs) < share)
    rejected = [(t, rng.integers(vocab)) for t in kept[kept >= 1] if rng.random() < 0.3]
    return TraceRecord(
        id=f"request-{seed}",
        tenant="t",
        domain=domain,
        target="abc:fp16",
        replica="r",
        finished_at=float(seed),
        sampling=sampling or Sampling(),
        prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
        output_ids=rng.integers(0, vocab, outputs).astype(np.int32),
        kinds=np.full(outputs, Kind.PLAIN, dtype=np.uint8),
        probs=rng.uniform(0.05, 1.0, outputs).astype(np.float32),
        rounds=(),
        topk_positions=kept.astype(np.int32),
        topk_ids=ids[kept].astype(np.int32),
        topk_logprobs=(np.take_along_axis(logits, ids, 1) - lse[:, None])[kept].astype(np.float16),
        topk_lse=lse[kept].astype(np.float32),
        rejected=np.array(rejected, dtype=np.int32).reshape(-1, 2),
        rejected_probs=np.full(len(rejected), 0.5, dtype=np.float32),
        has_features=True,
    )


def random_example(seed: int, **shape: object) -> Example:
    record = random_record(seed, **shape)  # type: ignore[arg-type]
    rows = len(record.prompt_ids) + len(record.output_ids) - 1
    noise = torch.Generator().manual_seed(seed)
    return Example(record, torch.randn(rows, len(FEATURE_LAYERS) * TARGET_HIDDEN, generator=noise).half())
