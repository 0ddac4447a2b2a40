"""A head before its first training step, started from the target's own last layer.

The fused features start as the target's high layer, the decoder layer as a copy of the target's last one that ignores
the token half of its input, and the output rows as the target's. So the head begins in the basis that the target's
vocabulary is read from, instead of finding it. Targets whose last layer has other parts start at random.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.models.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers

log = logging.getLogger(__name__)
_SPREAD = 0.02


def choose_draft_vocabulary(token_ids: Iterable[Tensor], size: int, vocab: int) -> Tensor:  # [size] ascending
    """The most frequent ids of `token_ids`, filled up by id: a tokenizer's low ids are its most general ones."""
    counts = torch.zeros(vocab, dtype=torch.long)
    for ids in token_ids:
        counts += torch.bincount(ids.long(), minlength=vocab)
    order = torch.argsort(counts, descending=True, stable=True)
    seen = order[: min(size, int((counts > 0).sum()))]
    rest = torch.ones(vocab, dtype=torch.bool)
    rest[seen] = False
    filling = rest.nonzero().squeeze(1)[: size - len(seen)]
    return torch.cat([seen, filling]).sort().values


def head_config(model: PreTrainedModel, draft_vocab: int, max_positions: int) -> Eagle3Config:
    """A head of the target's own layer shape."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return Eagle3Config(
        target_hidden=config.hidden_size,
        feature_layers=default_feature_layers(config.num_hidden_layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        draft_vocab=draft_vocab,
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        rms_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        max_positions=max_positions,
    )


@torch.no_grad()
def initial_head(model: PreTrainedModel, config: Eagle3Config, draft_ids: Tensor, seed: int) -> Eagle3Head:
    """A trainable fp32 head; `model` is the unpacked target."""
    torch.manual_seed(seed)
    embedding: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    head = Eagle3Head(config, embedding)
    head.draft_ids.copy_(draft_ids)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_SPREAD)
    output = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    if output.shape[1] == config.hidden:
        head.lm_head.weight.copy_(output[draft_ids])
    try:
        _copy_last_layer(model, head)
    except (AttributeError, RuntimeError) as error:
        log.info("the target's last layer does not fit a head (%s): it starts at random", error)
    return head.requires_grad_(True)


def _copy_last_layer(model: PreTrainedModel, head: Eagle3Head) -> None:
    config = head.config
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    layer = decoder.layers[-1]
    attention, mlp = layer.self_attn, layer.mlp
    parts = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
    for name, source in parts.items():
        own = getattr(head, name).weight  # [out, token half | feature half]
        own[:, config.target_hidden :].copy_(source.weight)
    head.o_proj.weight.copy_(attention.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(head, name).weight.copy_(getattr(mlp, name).weight)
    head.feature_norm.weight.copy_(layer.input_layernorm.weight)
    head.mlp_norm.weight.copy_(layer.post_attention_layernorm.weight)
    head.norm.weight.copy_(decoder.norm.weight)
    head.fc.weight.zero_()
    head.fc.weight[:, -config.target_hidden :].copy_(torch.eye(config.hidden))
