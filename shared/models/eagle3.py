"""The EAGLE-3 head: one decoder layer that drafts from three of the target's layers (Li et al. 2025, arXiv:2503.01840).

Row i reads the embedding of token i+1 and the fused features of position i, and predicts token i+2. Deeper draft steps
feed the layer's own output back in place of features that do not exist yet. Attention is handed in, so that serving
(paged) and training (unrolled) run the very same layer. The token embedding is the target's own tensor, shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.artifact import Artifact
from shared.errors import ArtifactError

# (query [tokens, heads, dim], key [tokens, kv_heads, dim], value, scale) -> [tokens, heads, dim]; training has a batch
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    target_hidden: int
    feature_layers: tuple[int, ...]  # outputs of these target layers, low to high
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    max_positions: int = 8192

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "feature_layers": list(self.feature_layers)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Eagle3Config:
        return cls(**{**tree, "feature_layers": tuple(tree["feature_layers"])})


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, ascending: 3, 15 and 28 of 30."""
    return (min(3, num_layers // 4), num_layers // 2, max(num_layers - 2, num_layers // 2))


class Eagle3Head(nn.Module):
    """The trainable module. Its state dict is the artifact; the shared embedding is not part of it."""

    draft_ids: Tensor  # [draft_vocab] target id of each draft row, ascending

    def __init__(self, config: Eagle3Config, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self._embedding = (embedding,)  # [vocab, target_hidden]; in a tuple: not a parameter, not saved
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden, config.hidden, bias=False)
        width = config.target_hidden + config.hidden
        self.token_norm = nn.RMSNorm(config.target_hidden, eps=config.rms_eps)
        self.feature_norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab))

    def fuse(self, features: Tensor) -> Tensor:  # [..., layers * target_hidden] -> [..., hidden]
        out: Tensor = self.fc(features)
        return out

    def forward(
        self,
        token_ids: Tensor,  # [..., tokens] the token after each row's position
        hidden: Tensor,  # [..., tokens, hidden] fused features, or the output of the draft step before
        positions: Tensor,  # [..., tokens]
        attend: Attend,
    ) -> Tensor:  # [..., tokens, hidden]
        """One pass of the layer; the result predicts through `logits` and feeds the next draft step."""
        config = self.config
        tokens = F.embedding(token_ids, self._embedding[0]).to(hidden.dtype)
        x = torch.cat([self.token_norm(tokens), self.feature_norm(hidden)], dim=-1)
        shape = x.shape[:-1]
        cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in angles(config, positions))  # [..., tokens, 1, half]
        query = _rotate(self.q_proj(x).view(*shape, config.heads, config.head_dim), cos, sin)
        key = _rotate(self.k_proj(x).view(*shape, config.kv_heads, config.head_dim), cos, sin)
        value = self.v_proj(x).view(*shape, config.kv_heads, config.head_dim)
        attended = attend(query, key, value, config.head_dim**-0.5).reshape(*shape, -1)
        hidden = hidden + self.o_proj(attended)
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:  # [..., hidden] -> [..., draft_vocab]
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


def angles(config: Eagle3Config, positions: Tensor) -> tuple[Tensor, Tensor]:  # [...] -> cos, sin [..., head_dim / 2]
    """Of the rotary embedding, in float32."""
    half = config.head_dim // 2
    inverse = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    turned = positions.unsqueeze(-1).float() * inverse
    return turned.cos(), turned.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def head_from_artifact(artifact: Artifact, embedding: Tensor) -> Eagle3Head:
    """The fp32 head of a full artifact. Raises ArtifactError (format or shape)."""
    try:
        config = Eagle3Config.from_dict(artifact.manifest.config)
    except (TypeError, KeyError) as error:
        raise ArtifactError("format", f"the manifest's config is not an EAGLE-3 head's: {error}") from error
    if config.target_hidden != embedding.shape[1]:
        raise ArtifactError(
            "shape",
            f"the head is for a target of width {config.target_hidden}, this target's is {embedding.shape[1]}",
        )
    head = Eagle3Head(config, embedding)
    try:
        head.load_state_dict({name: _plain(tensor) for name, tensor in artifact.tensors.items()})
    except RuntimeError as error:
        raise ArtifactError("shape", f"the tensors do not fit the config: {error}") from error
    if int(head.draft_ids.max()) >= embedding.shape[0]:
        raise ArtifactError("vocabulary", "the draft vocabulary names ids that the target does not have")
    return head.eval().requires_grad_(False)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
