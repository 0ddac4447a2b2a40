"""A speculation round's time and tokens for each way to draft, and the gamma that makes the most of a batch.

Tokens a round are (1-a^(g+1))/(1-a) for each request (Leviathan et al. 2023, eq. 1), as the engine's own controller
has it. Drafting is charged by the roofline of what drafts; an n-gram lookup costs nothing on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from ops.plan_calls import Calls
from ops.plan_roofline import Model
from ops.plan_shape import ModelShape
from shared.acceptance import expected_tokens
from shared.config import DrafterConfig

Kind = Literal["none", "ngram", "eagle3", "model"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVED = frozenset(KINDS) & frozenset(get_args(get_type_hints(DrafterConfig)["kind"]))  # by this release
# What is assumed of a drafter nobody has measured; `--alpha` sets one's own.
ALPHAS: dict[Kind, float] = {"none": 0.0, "ngram": 0.3, "eagle3": 0.7, "model": 0.75}
BATCHES = 1024  # largest batch that is looked at


@dataclass(frozen=True)
class Drafting:
    """How drafts are made for one target. `drafter` is None where nothing of size drafts."""

    kind: Kind
    alpha: float
    drafter: Model | None = None
    gamma_max: int = 4

    def seconds(self, batch: float, gamma: int, context: float, tokens: float) -> float:
        """Of drafting `gamma` tokens for each of `batch` requests, when a round yields `tokens`."""
        drafter = self.drafter
        if not gamma or drafter is None:
            return 0.0
        # A feature head first reads all positions that the last round committed; a language model has read them.
        first = batch * (tokens if drafter.fused else 1.0)
        seconds = drafter.step(first, context, batch, decided=batch, fused=True).seconds
        return seconds + (gamma - 1) * drafter.step(batch, context, batch).seconds


@dataclass(frozen=True)
class Round:
    """What one round of a batch comes to."""

    gamma: int
    tokens: float  # of each request
    draft: float  # seconds
    verify: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify

    @property
    def token_seconds(self) -> float:
        """Of a request's token: a round, shared by the tokens that it yields."""
        return self.seconds / self.tokens


def round_of(target: Model, drafting: Drafting, batch: float, gamma: int, context: float, prompt: float = 0) -> Round:
    """One round beside `prompt` rows of prompts that are read in the same step."""
    tokens = expected_tokens(drafting.alpha, gamma) if gamma else 1.0
    decided = batch * (1 + gamma)
    # A prompt's rows attend to half of it on average, and its KV is read once a chunk: counted as one more sequence.
    verify = target.step(decided + prompt, context, batch + (1 if prompt else 0), decided=decided)
    return Round(gamma, tokens, drafting.seconds(batch, gamma, context, tokens), verify.seconds)


def best_round(target: Model, drafting: Drafting, batch: float, context: float) -> Round:
    """The gamma with the least time a token, 0 included."""
    gammas = range(drafting.gamma_max + 1 if drafting.kind != "none" else 1)
    return min(
        (round_of(target, drafting, batch, gamma, context) for gamma in gammas), key=lambda found: found.token_seconds
    )


def pays_until(target: Model, drafting: Drafting, context: float) -> int:
    """The largest batch at which drafting beats plain decoding; 0: never, BATCHES: as far as was looked."""
    last = 0
    for batch in range(1, BATCHES + 1):
        if best_round(target, drafting, batch, context).gamma:
            last = batch
    return last


def eagle3_head(target: Model, draft_vocab: int, feature_layers: int = 3) -> Model:
    """This release's EAGLE-3 head for a target: one layer of its width, whose attention reads token beside feature."""
    shape = target.shape
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    body = 2 * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * shape.intermediate
    vocab = min(draft_vocab, shape.vocab)
    head = ModelShape(
        name="eagle3",
        layers=1,
        hidden=hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=vocab,
        max_positions=shape.max_positions,
        body=body,
        head=hidden * vocab,
        small=4 * hidden,
    )
    calls = Calls(*(target.calls.of_layers(shape.layers, 1).__dict__.values()))
    return Model(head, target.weights, target.device, calls, fused=feature_layers * hidden * hidden)


def draftings(
    target: Model,
    alphas: dict[Kind, float],
    *,
    gamma_max: int,
    draft_vocab: int,
    draft_model: Model | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> list[Drafting]:
    """Every kind that can be planned for this target; a language model only if one is named."""
    drafters = {"eagle3": eagle3_head(target, draft_vocab), "model": draft_model}
    return [
        Drafting(kind, alphas.get(kind, ALPHAS[kind]), drafters.get(kind), gamma_max)
        for kind in kinds
        if kind != "model" or draft_model is not None
    ]
