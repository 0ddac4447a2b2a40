"""Real traffic of a tiny target: a checkpoint, a random head in front of it, and the traces that serving both makes.

The head starts with random weights, so that training has something to win. Prompts are random and never repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from learner.features import FeatureInbox
from serving.batch import BatchRunner
from serving.drafters.eagle3 import Eagle3Drafter
from serving.engine.engine import Limits, Tracing
from serving.engine.request import GenerationParams, GenerationRequest
from serving.spec.gamma import GammaController
from shared.artifact import Artifact, Manifest, load_folder, pack_blob, save_folder
from shared.config import Config, config_from_flat
from shared.models.eagle3 import Eagle3Config, Eagle3Head, head_from_artifact
from shared.models.eagle3_served import ServedHead
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import load_model
from shared.store import Store
from shared.trace import Sampling, TraceRecord, encode
from tests.tiny import build_tiny_model

VOCAB, LAYERS, GAMMA, TOKENS = 64, (0, 1), 2, 24
SAMPLED = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Served:
    record: TraceRecord
    features: NDArray[np.float16]  # [prompt + n - 1, layers * hidden]

    @property
    def data(self) -> bytes:
        return encode(self.record)


class TinyServing:
    """One target and the base head, as a replica would serve them; `config` is what a learner for them gets."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        target = _predictable(build_tiny_model(folder / "target", vocab=VOCAB, spread=0.5))
        loaded = load_model(str(target), home=folder, device="cpu", weights="fp32")
        self.fingerprint = loaded.fingerprint
        embedding = loaded.model.get_input_embeddings().weight.detach()
        self.head_folder = folder / "head"
        save_folder(_random_head(embedding, loaded.fingerprint), self.head_folder)
        self._target = PagedModel(loaded, PagedKV(128, 16), LAYERS)
        self._head = ServedHead(head_from_artifact(load_folder(self.head_folder)[0], embedding), embedding)
        self._count = 0
        self.config: Config = config_from_flat(
            {
                "home": str(folder / "home"),
                "target.model": str(target),
                "target.dtype": "fp32",
                "drafter.model": str(self.head_folder),
                "drafter.gamma": GAMMA,
                "learner.min_fresh_tokens": 600,
                "learner.attempt_tokens": 6000,
                "learner.batch_tokens": 64,
                "learner.learning_rate": 0.02,
                "gate.min_requests": 12,
                "gate.resamples": 400,
                "mlflow.window_s": 0.2,
                **settings,
            }
        )

    def serve(self, count: int, domain: str = "chat", sampling: Sampling = SAMPLED) -> Iterator[Served]:
        """Finished requests with prompts that never came before, served by the base head."""
        found: list[Served] = []

        def keep(record: TraceRecord, features: torch.Tensor | None) -> None:
            assert features is not None
            found.append(Served(record, features.numpy()))

        kv = PagedKV(128, 16)
        drafter = Eagle3Drafter(self._head, "base", kv, vocab_size=VOCAB, device=torch.device("cpu"))
        runner = BatchRunner(
            self._target,
            drafter,
            GammaController(fixed=GAMMA, most=GAMMA, exploration=0.0),
            Limits(max_context=256, max_batch=8, prefill_tokens=64),
            Tracing(keep, "replica", topk=32, position_share=1.0, wants_features=lambda _: True),
        )
        for _ in runner.run(self._requests(count, domain, sampling)):
            yield from found
            found.clear()

    def _requests(self, count: int, domain: str, sampling: Sampling) -> Iterator[GenerationRequest]:
        for _ in range(count):
            self._count += 1
            prompt = np.random.default_rng(self._count).integers(3, VOCAB, 8)
            params = GenerationParams(
                replace(sampling, seeded=False), max_tokens=TOKENS, ignore_eos=True, speculative=True
            )
            yield GenerationRequest(f"request-{self._count}", tuple(int(token) for token in prompt), params, domain)

    def publish(self, store: Store, inbox: FeatureInbox | None, count: int, domain: str = "chat") -> list[Served]:
        """Serves and hands over as a replica does: features to the inbox, if there is one, traces to the stream."""
        served = list(self.serve(count, domain))
        for item in served:
            if inbox is not None:
                inbox.put(item.record.id, item.features)
            store.append_trace(item.data, max_bytes=2**26)
        return served


def random_adapter(serving: TinyServing) -> bytes:
    """Fits the base, and says nothing useful."""
    base, digest = load_folder(serving.head_folder)
    outputs, inputs = base.tensors["lm_head.weight"].shape
    noise = torch.Generator().manual_seed(11)
    tensors = {
        "lm_head.lora_A": torch.randn((4, inputs), generator=noise),
        "lm_head.lora_B": torch.randn((outputs, 4), generator=noise),
    }
    settings = {"rank": 4, "lora_alpha": 8}
    return pack_blob(
        Artifact(Manifest("bad", "eagle3", "lora", target=serving.fingerprint, base=digest, config=settings), tensors)
    )


def _predictable(folder: Path) -> Path:
    """Weakens the layers, so that a token depends mostly on the one before it: something that a head can learn."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.01)
    model.save_pretrained(folder)
    return folder


def _random_head(embedding: torch.Tensor, fingerprint: str) -> Artifact:
    width = embedding.shape[1]
    config = Eagle3Config(
        target_hidden=width,
        feature_layers=LAYERS,
        hidden=32,
        intermediate=48,
        heads=4,
        kv_heads=2,
        head_dim=8,
        draft_vocab=VOCAB - 8,
    )
    noise = torch.Generator().manual_seed(5)
    head = Eagle3Head(config, embedding)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.25, generator=noise)
    manifest = Manifest(version="base", kind="eagle3", form="full", target=fingerprint, config=config.to_dict())
    return Artifact(manifest, head.state_dict())
