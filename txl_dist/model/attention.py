"""The attention layer: projections of queries, keys and values around whatever scores them (`implementation`).

Keys and values are made apart from queries, so that the past may be kept as keys and values. Parameters stand in the
module whose `forward` uses them, because ZeRO-3 gathers them there. `positions` builds the layer of each scheme.

Shapes: B lanes, T queries, K keys, S any positions, D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from txl_dist.errors import ConfigError
from txl_dist.model.fused_attention import fused_relative_attention
from txl_dist.model.kernels import launch
from txl_dist.model.memory import Visibility
from txl_dist.model.relative_attention import Terms, relative_attention
from txl_dist.model.rms_norm import rms_norm
from txl_dist.sections import AttentionKernel, ModelSection

QUERY_KEY_GAIN = 1.2
"""Of normed queries and keys (nanochat): their products would hardly tell one key from another without."""


class Distances(NamedTuple):
    """What a layer knows of the distances K-1 ... 0, in that order."""

    key_KNH: Tensor
    """The encodings r as the layer sees them."""
    bias_KN: Tensor | None
    """Learned term (d); None where it is made with the bias v."""


class KeyValue(nn.Linear):
    """The projection to keys and values, with a bias on the values only, where the model has one."""

    def __init__(self, model: ModelSection) -> None:
        inner = model.num_heads * model.head_width
        super().__init__(model.width, 2 * inner, bias=False)
        self.value_bias = nn.Parameter(torch.empty(inner)) if model.value_bias else None

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Keys, then values, of any positions: [B, S, 2 N H]."""
        bias = None if self.value_bias is None else F.pad(self.value_bias, (self.value_bias.numel(), 0))
        return F.linear(hidden_BSD, self.weight, bias)


class Attention(nn.Module):
    """Scores by content and, with a module `distance` that makes `Distances`, by distance.

    The biases u (content) and v (position) are given, since layers may share them.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        distance: nn.Module | None = None,
        content_bias_NH: nn.Parameter | None = None,
        position_bias_NH: nn.Parameter | None = None,
        mixes_values: bool = False,
        kernel: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_width, self.dropout = model.num_heads, model.head_width, model.attention_dropout
        self.kernel, self.norm_eps = kernel, model.norm_eps if model.query_key_norm else None
        inner = model.num_heads * model.head_width
        self.query = nn.Linear(model.width, inner, bias=False)
        self.key_value = KeyValue(model)
        self.distance = distance
        self.output = nn.Linear(inner, model.width, bias=model.output_bias)
        # Registered in every layer that uses them, so that ZeRO-3 gathers them with the layer.
        self.content_bias, self.position_bias = content_bias_NH, position_bias_NH
        self.value_share = nn.Parameter(torch.empty(1)) if mixes_values else None

    def project_query(self, hidden_BTD: Tensor) -> Tensor:
        """query_BTNH."""
        return self.normed(self.query(hidden_BTD).unflatten(-1, (self.num_heads, self.head_width)))

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """key_value_BS2NH of any positions, not `finished`."""
        key_value: Tensor = self.key_value(hidden_BSD)
        return key_value.view(*key_value.shape[:-1], 2, self.num_heads, self.head_width)

    def finished(self, key: Tensor, value: Tensor, first_value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [..., H] of any positions as they are attended to: normed, mixed with the values of the first
        layer there, where the model has it so."""
        if self.value_share is not None:
            assert first_value is not None
            value = torch.lerp(value, first_value, self.value_share.to(value.dtype))
        return self.normed(key), value

    def finished_key_value(self, key_value_BS2NH: Tensor, first_value_BSNH: Tensor | None) -> Tensor:
        """The same of both in one tensor."""
        if self.norm_eps is None and self.value_share is None:
            return key_value_BS2NH
        key, value = key_value_BS2NH.unbind(-3)
        return torch.stack(self.finished(key, value, first_value_BSNH), dim=-3)

    def normed(self, heads: Tensor, *, gain: float = QUERY_KEY_GAIN) -> Tensor:
        """Queries or keys [..., H], each divided by its root mean square where the model has it so."""
        return heads if self.norm_eps is None else rms_norm(heads, eps=self.norm_eps, gain=gain)

    def distances(self, num_distances: int, *, encoding_KD: Tensor | None) -> Distances | None:
        """What this layer knows of the distances K-1 ... 0, given their sinusoids where it uses them."""
        if self.distance is None:
            return None
        key_KNH, bias_KN = self.distance(num_distances, encoding_KD)
        return Distances(self.normed(key_KNH, gain=1.0), bias_KN)

    def forward(
        self,
        hidden_BTD: Tensor,
        *,
        key_BKNH: Tensor,
        value_BKNH: Tensor,
        distances: Distances | None,
        visible: Visibility,
    ) -> Tensor:
        """Attend from `hidden_BTD` to given keys and values. Returns the projected context_BTD."""
        query_BTNH = self.project_query(hidden_BTD)
        terms = Terms(query_BTNH, key_BKNH, value_BKNH)
        if distances is not None:
            key_KNH, bias_KN = distances
            terms = Terms(*terms[:3], key_KNH, self.content_bias, self.position_bias, bias_KN)
        output: Tensor = self.output(self.attend(terms, visible=visible).flatten(2))
        return output

    def attend(self, terms: Terms, *, visible: Visibility) -> Tensor:
        """context_BTNH."""
        dropout = self.dropout if self.training else 0.0
        return implementation(self.kernel, terms)(terms, visible=visible, dropout=dropout)


def implementation(kernel: AttentionKernel, terms: Terms) -> Callable[..., Tensor]:
    """What computes attention of these terms, by the setting `engine.attention`; all are called alike.

    Raises ConfigError if the Triton kernels are asked for and cannot run.
    """
    if terms.distance_KNH is None:
        return dot_product_attention
    if kernel in ("plain", "fused"):
        return relative_attention if kernel == "plain" else fused_relative_attention
    obstacle = launch.obstacle(terms.query_BTNH, has_position_bias=terms.position_bias_NH is not None)
    if kernel == "triton" and obstacle is not None:
        raise ConfigError(f'engine.attention = "triton" cannot run: {obstacle}. Set it to "auto" or "fused".')
    return launch.triton_relative_attention if obstacle is None else fused_relative_attention


def dot_product_attention(terms: Terms, *, visible: Visibility, dropout: float = 0.0) -> Tensor:
    """Scaled dot products of queries and keys alone, by torch. Returns context_BTNH."""
    query, key, value = (x.transpose(1, 2) for x in terms[:3])
    # Not cuDNN's, whose backward gives NaN for some lengths with a mask (pytorch #196678), and torch would choose.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        context_BNTH = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible.mask()[:, None], dropout_p=dropout
        )
    return context_BNTH.transpose(1, 2)
