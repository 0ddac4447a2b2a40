"""Which transformers models are Llama-shaped, decided by what they are made of and by what they compute.

A model whose parts have the right names and kinds gets a twin: the same class and config, shrunk, with random weights.
Only if transformers' own code and the fused decoder give the twin the same logits is the model itself fused. So a
family with an extra factor, another norm or another rotation is found out without being listed, and a newer
transformers that changes one costs speed, never correctness.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.models.attention import AttentionPlan, PagedKV, Segment
from shared.models.decoder import DecoderLayer, FusedDecoder, RmsNorm
from shared.models.fuse import GATE_UP, QKV, fuse_layer
from shared.models.rotary import RotaryTable, pair_order
from shared.models.support import usable_positions
from shared.models.transformers_forward import TransformersForward

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ROWS, _VOCAB = 12, 32  # of the twin
_CLOSE = 1e-3  # of logits of order 1; every wrong formula is far outside

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerCall:
    """What a layer hands to its attention function."""

    scale: float
    window: int
    softcap: float


Shape = tuple[LayerCall, ...]  # one for each layer
_shapes: dict[tuple[type, str], Shape | None] = {}  # by class and config: a swap asks again


def fuse(model: Any) -> bool:
    """Fuses the projections of a Llama-shaped model in place, before its linears are packed; False for others."""
    if is_fused(model):
        return True
    if not _right_parts(model) or _shape(model) is None:
        return False
    for layer in model.model.layers:
        fuse_layer(layer)
    return True


def is_fused(model: Any) -> bool:
    layers: Any = getattr(getattr(model, "model", None), "layers", None)
    return bool(layers) and hasattr(getattr(layers[0], "self_attn", None), QKV)


def fused_decoder(model: PreTrainedModel) -> FusedDecoder:
    """The fast forward of a model that `fuse` has accepted; packed or not, the weights are shared."""
    shape = _shape(model)
    assert shape is not None, "fuse has looked"
    return _decoder(model, shape)


def _decoder(model: Any, shape: Shape) -> FusedDecoder:
    decoder = model.model
    layers = [
        (_norm(layer.input_layernorm), _layer(layer, call, index))
        for index, (layer, call) in enumerate(zip(decoder.layers, shape, strict=True))
    ]

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = decoder.rotary_emb(like, position_ids=positions.unsqueeze(0))
        half = cos.shape[-1] // 2  # the other half repeats it
        return cos[0, :, :half], sin[0, :, :half]

    rotary = RotaryTable(angles, usable_positions(model.config, "target"))
    return FusedDecoder(decoder.embed_tokens.weight, layers, _norm(decoder.norm), model.lm_head.forward, rotary)


def _layer(layer: Any, call: LayerCall, index: int) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    dim, rows = attention.head_dim, [len(getattr(attention, name).rows) for name in ("q_proj", "k_proj")]
    heads, kv_heads = rows[0] // dim, rows[1] // dim
    return DecoderLayer(
        index=index,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=call.scale,
        window=call.window,
        qkv=getattr(attention, QKV).forward,
        out=attention.o_proj.forward,
        gate_up=getattr(mlp, GATE_UP).forward,
        down=mlp.down_proj.forward,
        mlp_norm=_norm(layer.post_attention_layernorm),
        head_norm=_head_norm(attention, heads, kv_heads) if hasattr(attention, "q_norm") else None,
        activation=F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
    )


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


def _head_norm(attention: Any, heads: int, kv_heads: int) -> RmsNorm:
    order = pair_order(attention.head_dim).to(attention.q_norm.weight.device)
    q, k = (norm.weight[order] for norm in _head_norms(attention))
    return RmsNorm(torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)]), attention.q_norm.variance_epsilon)


def _head_norms(attention: Any) -> tuple[Any, Any]:
    return attention.q_norm, attention.k_norm


def _right_parts(model: Any) -> bool:
    decoder, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or not isinstance(decoder, nn.Module) or _names(decoder) != _DECODER:
        return False
    layers: Any = decoder.layers
    return _names(model) == {"model", "lm_head"} and all(map(_right_layer, layers))


def _right_layer(layer: Any) -> bool:
    if _names(layer) != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _names(attention) - {"q_norm", "k_norm"} != _ATTENTION or _names(mlp) != _MLP:
        return False
    linears = [getattr(attention, name) for name in sorted(_ATTENTION)] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    dim = getattr(attention, "head_dim", 0)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += _head_norms(attention)
        if any(norm.weight.shape != (dim,) for norm in _head_norms(attention)):
            return False
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and len({getattr(attention, name).bias is None for name in ("q_proj", "k_proj", "v_proj")}) == 1
        and (mlp.gate_proj.bias is None) == (mlp.up_proj.bias is None)
        and dim > 0
        and dim % 2 == 0
    )


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _shape(model: PreTrainedModel) -> Shape | None:
    key = (type(model), model.config.to_json_string(use_diff=False))
    if key not in _shapes:
        try:
            _shapes[key] = _compare(_twin(model))
        except Exception as error:  # a config that cannot be shrunk, or code that does not fit: not ours to serve fast
            log.debug("no twin of %s: %r", type(model).__name__, error)
            _shapes[key] = None
        if _shapes[key] is None:
            log.info("%s is served through transformers' own modules", type(model).__name__)
    return _shapes[key]


def _twin(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    dim = model.model.layers[0].self_attn.head_dim  # kept: rotary scalings depend on it
    shared = config.num_key_value_heads != config.num_attention_heads
    changes = {
        "hidden_size": 2 * dim,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if shared else 2,
        "head_dim": dim,
        "vocab_size": _VOCAB,
        "pad_token_id": None,  # special ids may lie outside so few tokens
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(model)(config).float().eval().requires_grad_(False)
        for parameter in twin.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return twin


class _Recorder(AttentionPlan):
    """A plan that remembers what the layers ask of it."""

    def __init__(self) -> None:
        super().__init__(PagedKV(1, _ROWS), [Segment([0], 0, _ROWS)], torch.device("cpu"))
        self.calls: dict[int, LayerCall] = {}

    def attend(self, layer: int, query: Tensor, rows: Tensor, **call: Any) -> Tensor:
        self.calls[layer] = LayerCall(call["scale"], call.get("window", 0), call.get("softcap", 0.0))
        return super().attend(layer, query, rows, **call)


@torch.inference_mode()
def _compare(twin: Any) -> Shape | None:
    ids = torch.arange(_ROWS) % _VOCAB
    asked = _Recorder()
    expected, _ = TransformersForward(twin, ()).forward(ids, asked, None, ())
    shape = tuple(asked.calls[index] for index in range(len(twin.model.layers)))
    if any(call.softcap for call in shape):
        return None
    for layer in twin.model.layers:
        fuse_layer(layer)
    logits, _ = _decoder(twin, shape).forward(ids, _Recorder(), None, ())
    return shape if torch.allclose(logits, expected, rtol=_CLOSE, atol=_CLOSE) else None
