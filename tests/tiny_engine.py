"""A tiny target, its dense reference, and one drafter of every kind over it: what the laws are run through.

`KINDS` is the one list of drafter kinds. A new kind adds its name there and a branch to `drafter` and `swap`.
Checkpoints are built once a bench; every `target()` and `drafter()` is a fresh load with caches of its own, so nothing
that one test does shows in another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from serving.batch import Answer, BatchRunner
from serving.drafters.base import Drafter
from serving.drafters.eagle3 import Eagle3Drafter
from serving.drafters.model import ModelDrafter
from serving.engine.engine import Engine, Limits, Tracing
from serving.engine.request import GenerationParams, GenerationRequest
from serving.spec.gamma import Asking, GammaController
from shared.models.eagle3 import Eagle3Config, Eagle3Head
from shared.models.eagle3_served import ServedHead
from shared.models.graphs import Recorder
from shared.models.paged import PagedKV, PagedModel
from shared.models.target import LoadedModel, load_model
from shared.trace import Sampling
from tests.fakes_drafters import ContraryDrafter, LyingDrafter, PickyDrafter, PointMassDrafter, ShortDrafter
from tests.tiny import build_tiny_model

KINDS = ("none", "eagle3", "model", "contrary", "point_mass", "short")
DRAFTING = KINDS[1:]
FEATURE_LAYERS = (0, 1)
GAMMA_MAX = 4
_MODEL_KINDS: dict[str, type[ModelDrafter]] = {
    "model": ModelDrafter,
    "contrary": ContraryDrafter,
    "point_mass": PointMassDrafter,
    "short": ShortDrafter,
    # Not in KINDS, since they break a law: they show that its test sees it.
    "lying": LyingDrafter,
    "picky": PickyDrafter,
}


class Bench:
    """One target and what drafts for it."""

    def __init__(self, folder: Path, *, vocab: int, weights: str = "fp32", spread: float = 0.25) -> None:
        self.home, self.vocab, self.weights = folder, vocab, weights
        self._folder = build_tiny_model(folder / "target", vocab=vocab, spread=spread)
        # Near drafters agree with the target often, far ones seldom; their padding is wider than the target's.
        self._near = _noisy_copy(self._folder, folder / "near", vocab=vocab, noise=0.02)
        self._far = build_tiny_model(folder / "far", vocab=vocab, pad_vocab_to=vocab + 24, hidden=16, seed=7)
        self.reference = self._load(self._folder)
        noise = torch.Generator().manual_seed(1)
        texts = torch.randint(3, vocab, (24, 12), generator=noise)
        self.heads = {version: self._head(texts, seed) for seed, version in enumerate(("base", "v1"))}

    def _load(self, folder: Path) -> LoadedModel:
        return load_model(str(folder), home=self.home, device="cpu", weights=self.weights)

    # --- what is served ---------------------------------------------------------------------------------------

    def target(self, *, blocks: int = 256, block_size: int = 16) -> PagedModel:
        return PagedModel(self._load(self._folder), PagedKV(blocks, block_size), FEATURE_LAYERS)

    def drafter(self, kind: str, target: PagedModel, recorder: Recorder | None = None) -> Drafter | None:
        """A fresh drafter at version "base" over the target's block layout."""
        kv = PagedKV(target.kv.num_blocks, target.kv.block_size)
        if kind == "none":
            return None
        if kind == "eagle3":
            head = self._served("base")
            vocab, cpu = target.loaded.vocab_size, torch.device("cpu")
            return Eagle3Drafter(head, "base", kv, vocab_size=vocab, device=cpu, recorder=recorder)
        return _MODEL_KINDS[kind](
            PagedModel(self._load(self._source(kind)), kv), "base", vocab_size=target.loaded.vocab_size
        )

    def _source(self, kind: str) -> Path:
        return self._folder if kind in ("contrary", "point_mass") else self._near

    def swap(self, drafter: Drafter | None) -> None:
        """To another version with other weights ("base" and "v1" take turns), as a replica does: the caches stay."""
        if drafter is None:
            return
        version = "v1" if drafter.version == "base" else "base"
        if isinstance(drafter, Eagle3Drafter):
            drafter.swap(self._served(version), version)
        elif isinstance(drafter, ModelDrafter):
            # A contrary drafter over a far model is only random; what it swaps to must have the same shape of KV.
            path = self._source(drafter.kind) if version == "base" else self._far_of(drafter.kind)
            drafter.swap(PagedModel(self._load(path), drafter.model.kv), version)
        else:
            raise AssertionError(f"no swap is written for {drafter.kind}")

    def _far_of(self, kind: str) -> Path:
        return self._near if kind in ("contrary", "point_mass") else self._folder

    # --- what is true -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def dense_logits(self, tokens: Sequence[int] | Tensor) -> Tensor:  # [..., tokens, vocab]
        """The target without paging, batching or cache: transformers' own attention over the whole text."""
        ids = torch.as_tensor(tokens)
        batch = ids if ids.ndim == 2 else ids.unsqueeze(0)
        logits: Tensor = self.reference.model(batch).logits.float()
        return logits if ids.ndim == 2 else logits[0]

    def _served(self, version: str) -> ServedHead:
        head = copy.deepcopy(self.heads[version])  # a served head may be written into
        return ServedHead(head, self.reference.model.get_input_embeddings().weight)

    @torch.inference_mode()
    def _head(self, prompts: Tensor, seed: int) -> Eagle3Head:
        """A random head whose output layer is fitted to the target's greedy answers, so that some drafts are right.

        The draft vocabulary is the more frequent part of the answers and random ids, in all two thirds of the target's.
        """
        texts = prompts
        for _ in range(36):
            texts = torch.cat([texts, self.dense_logits(texts)[:, -1:].argmax(-1)], dim=1)
        features = torch.cat(outputs(self.reference, texts, FEATURE_LAYERS), dim=-1)
        width = self.reference.model.get_input_embeddings().weight
        config = Eagle3Config(
            target_hidden=width.shape[1],
            feature_layers=FEATURE_LAYERS,
            hidden=48,
            intermediate=64,
            heads=4,
            kv_heads=2,
            head_dim=8,
            draft_vocab=2 * self.vocab // 3,
        )
        noise = torch.Generator().manual_seed(seed)
        head = Eagle3Head(config, width)
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)
        frequency = torch.bincount(texts[:, prompts.shape[1] :].flatten(), minlength=self.vocab)
        order = (frequency + torch.rand(self.vocab, generator=noise)).argsort(descending=True)
        head.draft_ids.copy_(order[: config.draft_vocab].sort().values)
        rows = texts.shape[1] - 2  # row i reads token i + 1 and predicts token i + 2
        positions = torch.arange(rows).expand(len(texts), rows)
        hidden = head(texts[:, 1:-1], head.fuse(features[:, :rows]), positions, attend_causally)
        x = head.norm(hidden).flatten(0, 1)
        wanted = (texts[:, 2:].flatten()[:, None] == head.draft_ids).float()
        ridge = x.T @ x + 1e-2 * torch.eye(x.shape[1])
        head.lm_head.weight.copy_(8 * torch.linalg.solve(ridge, x.T @ wanted).T)
        return head.eval().requires_grad_(False)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # [b, tokens, heads, dim]
    """The head's attention over whole texts, from position 0 on."""
    swapped = (part.transpose(1, 2) for part in (query, key, value))
    out = F.scaled_dot_product_attention(*swapped, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def outputs(loaded: LoadedModel, texts: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """What each asked layer puts out, [b, tokens, hidden], by hooks as the engine takes them."""
    found: dict[int, Tensor] = {}
    modules = loaded.model.get_decoder().layers  # type: ignore[no-untyped-call]

    def keep(index: int) -> Callable[..., None]:
        return lambda _module, _args, out: found.update({index: out if isinstance(out, Tensor) else out[0]})

    hooks = [modules[index].register_forward_hook(keep(index)) for index in layers]
    loaded.model(texts)
    for hook in hooks:
        hook.remove()
    return [found[index] for index in layers]


def _noisy_copy(source: Path, folder: Path, *, vocab: int, noise: float) -> Path:
    """A model of the same weights plus noise, its vocabulary padded to another width."""
    build_tiny_model(folder, vocab=vocab, pad_vocab_to=vocab + 40)
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            taken = original[name]
            weight[: len(taken)] = taken + noise * torch.randn(taken.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


class GammaByDomain(GammaController):
    """A request of domain "gK..." drafts K tokens, so that one batch holds every gamma."""

    def __init__(self) -> None:
        super().__init__(fixed=GAMMA_MAX, most=GAMMA_MAX, exploration=0.0)

    def choose(self, asking: Sequence[Asking], *, plain: int = 0) -> list[int]:
        return [max(0, min(int(one.domain[1]), one.limit)) for one in asking]


def fixed_gamma(gamma: int) -> GammaController:
    return GammaController(fixed=gamma, most=max(gamma, GAMMA_MAX), exploration=0.0)


def serve(
    target: PagedModel,
    drafter: Drafter | None,
    requests: Iterable[GenerationRequest],
    controller: GammaController,
    *,
    max_batch: int = 16,
    prefill_tokens: int = 64,
    max_context: int = 512,
    prefix_cache: bool = True,
    tracing: Tracing | None = None,
    between: Callable[[Engine], None] | None = None,
) -> tuple[dict[str, Answer], Engine]:
    """Every answer by request id. Blocks are accounted for after every step."""
    limits = Limits(max_context, max_batch, prefill_tokens, prefix_cache)
    runner = BatchRunner(target, drafter, controller, limits, tracing)

    def after_step(engine: Engine) -> None:
        engine.allocator.check([sequence.table for sequence in engine.scheduler])
        if between is not None:
            between(engine)

    answers = {answer.request.id: answer for answer in runner.run(requests, between=after_step)}
    assert runner.engine.allocator.free == runner.engine.allocator.num_blocks, "blocks outlived their requests"
    return answers, runner.engine


def request(
    id: str,
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    *,
    seed: int | None = None,
    domain: str = "default",
    max_tokens: int = 40,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = True,
    speculative: bool = True,
    **more: Any,  # of GenerationParams
) -> GenerationRequest:
    """Greedy unless told."""
    params = GenerationParams(
        sampling=sampling or Sampling(temperature=0.0),
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        speculative=speculative,
        **more,
    )
    return GenerationRequest(id, tuple(prompt), params, domain=domain)
