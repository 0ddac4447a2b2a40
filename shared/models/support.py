"""Which checkpoints the engine can serve exactly, decided from the config before any weight is read.

The engine owns the KV cache and replaces the attention function, so every layer must be causal attention over
keys and values that a block table can hold. Whatever keeps other state is refused here, never corrupted later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_CAUSAL_THOUGH_NOT_MARKED = frozenset({"gpt_neox"})  # its config says is_decoder=False, and means nothing by it
_REMEDY = "Use a decoder-only model whose layers are all attention (Llama, Qwen, Mistral, Gemma, SmolLM, ...)"


def check_supported(config: PreTrainedConfig, field: str) -> None:
    """ConfigError naming `field` and the reason, for a model that cannot be served exactly."""
    problem = _problem(config)
    if problem:
        raise ConfigError(field, f"{config.model_type} models cannot be served: {problem}", _REMEDY)


def usable_positions(config: PreTrainedConfig, field: str) -> int:
    """Positions that can be served; rotary scalings that change with a call's longest row stop before they do.

    (dynamic NTK and LongRoPE choose their frequencies by the largest position in the batch: past the original
    length, a row's result would depend on its neighbours.)
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(field, "its config has no max_position_embeddings", _REMEDY)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit


def _problem(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if hasattr(config, "text_config"):
        return "its config wraps a text model beside other parts (vision or audio); use the text-only checkpoint"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are already quantised; use the plain checkpoint, Redraft packs it itself"
    model_class = _causal_lm_class(config)
    if model_class is None:
        return "transformers has no causal language model for it"
    if model_class._is_stateful:
        return "it carries recurrent state, which cannot be rolled back after a rejected draft"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS):
        return f"it has layers that are not plain causal attention ({', '.join(other)})"
    if not model_class._supports_attention_backend:
        return "it does not take a registered attention function"
    if getattr(config, "is_decoder", None) is False and config.model_type not in _CAUSAL_THOUGH_NOT_MARKED:
        return "it is an encoder with attention in both directions"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers share the keys and values of others"
    return None


def _causal_lm_class(config: PreTrainedConfig) -> Any:
    """The class that AutoModelForCausalLM would build, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """All rotary settings: one dict, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
