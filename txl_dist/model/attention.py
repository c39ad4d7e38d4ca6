"""The attention layers: projections of queries, keys and values around one of three ways to know positions.

    RelativeAttention with SinusoidalDistances   sinusoids projected by W_R, biases u and v (the paper)
    RelativeAttention with LearnedDistances      a learned vector and number per distance, bias u (Shaw; labml)
    AbsoluteAttention                            none: positions were added to the embedding (Vaswani; vanilla)

Keys and values are made apart from queries, so that the past may be kept as keys and values. Parameters stand in the
module whose `forward` uses them, because ZeRO-3 gathers them there.

Shapes: B lanes, T queries, K keys, S any positions, P rows of a table, D model width, N heads, H head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from txl_dist.model.relative_attention import relative_attention
from txl_dist.sections import AttentionKernel, ModelSection


class Distances(NamedTuple):
    """What a layer knows of the distances K-1 ... 0, in that order."""

    key_KNH: Tensor
    """The encodings r as the layer sees them."""
    bias_KN: Tensor | None
    """Learned term (d); None where it is made with the bias v."""

    def last(self, num_distances: int) -> Distances:
        """The shortest so many."""
        bias_KN = None if self.bias_KN is None else self.bias_KN[-num_distances:]
        return Distances(self.key_KNH[-num_distances:], bias_KN)


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


class SinusoidalDistances(nn.Linear):
    """W_R: the sinusoids of the distances as a layer sees them."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__(model.width, model.num_heads * model.head_width, bias=False)
        self.head_width = model.head_width

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> Distances:  # type: ignore[override]
        """Of the distances K-1 ... 0, whose sinusoids are given; called as `LearnedDistances` is."""
        assert encoding_KD is not None
        assert encoding_KD.shape[0] == num_distances
        return Distances(super().forward(encoding_KD).unflatten(-1, (-1, self.head_width)), None)


class LearnedDistances(nn.Module):
    """A table with a row per distance, shortest first; larger distances share the last row that may be read."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.num_rows = min(model.num_distances, model.clamp_len + 1) if model.clamp_len else model.num_distances
        self.weight = nn.Parameter(torch.empty(model.num_distances, model.num_heads, model.head_width))
        self.bias = nn.Parameter(torch.empty(model.num_distances, model.num_heads))

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> Distances:
        """The rows of the distances K-1 ... 0; sinusoids are not used."""
        return Distances(self._rows(self.weight, num_distances), self._rows(self.bias, num_distances))

    def _rows(self, table: Tensor, num_distances: int) -> Tensor:
        known = min(num_distances, self.num_rows)
        rows = table[:known].flip(0)
        # Not by index: the gradient of repeated rows would be a scatter, whose order of sums is not fixed on a GPU.
        far = rows[:1].expand(num_distances - known, *rows.shape[1:])
        return torch.cat([far, rows])


class Attention(nn.Module, ABC):
    """Projections in and out, and the order of things, around the scores of a subclass."""

    def __init__(self, model: ModelSection, *, distance: nn.Module | None) -> None:
        super().__init__()
        self.num_heads, self.head_width, self.dropout = model.num_heads, model.head_width, model.attention_dropout
        inner = model.num_heads * model.head_width
        self.query = nn.Linear(model.width, inner, bias=False)
        self.key_value = KeyValue(model)
        self.distance = distance
        self.output = nn.Linear(inner, model.width, bias=model.output_bias)

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """key_value_BS2NH of any positions."""
        key_value: Tensor = self.key_value(hidden_BSD)
        return key_value.view(*key_value.shape[:-1], 2, self.num_heads, self.head_width)

    def distances(self, num_distances: int, *, encoding_KD: Tensor | None) -> Distances | None:
        """What this layer knows of the distances K-1 ... 0, given their sinusoids where it uses them."""
        return None if self.distance is None else self.distance(num_distances, encoding_KD)

    def forward(
        self, hidden_BTD: Tensor, *, key_value_BK2NH: Tensor, distances: Distances | None, visible: Visibility
    ) -> Tensor:
        """Attend from `hidden_BTD` to given keys and values. Returns the projected context_BTD."""
        query_BTNH = self.query(hidden_BTD).unflatten(-1, (self.num_heads, self.head_width))
        key_BKNH, value_BKNH = key_value_BK2NH.unbind(2)  # two slices would have two gradients filled with zeros
        context_BTNH = self.attend(query_BTNH, key_BKNH, value_BKNH, distances=distances, visible=visible)
        output: Tensor = self.output(context_BTNH.flatten(2))
        return output

    def rate(self) -> float:
        """Dropout on the probabilities now."""
        return self.dropout if self.training else 0.0

    @abstractmethod
    def attend(
        self,
        query_BTNH: Tensor,
        key_BKNH: Tensor,
        value_BKNH: Tensor,
        *,
        distances: Distances | None,
        visible: Visibility,
    ) -> Tensor:
        """context_BTNH."""


class RelativeAttention(Attention):
    """Scores by distance. The biases are given, since layers may share them; learned distances have no v."""

    def __init__(
        self,
        model: ModelSection,
        *,
        distance: SinusoidalDistances | LearnedDistances,
        content_bias_NH: nn.Parameter,
        position_bias_NH: nn.Parameter | None,
        kernel: AttentionKernel,
    ) -> None:
        super().__init__(model, distance=distance)
        self.kernel = kernel
        # Registered in every layer that uses them, so that ZeRO-3 gathers them with the layer.
        self.content_bias, self.position_bias = content_bias_NH, position_bias_NH

    def attend(
        self,
        query_BTNH: Tensor,
        key_BKNH: Tensor,
        value_BKNH: Tensor,
        *,
        distances: Distances | None,
        visible: Visibility,
    ) -> Tensor:
        """See `Attention`."""
        assert distances is not None
        attend = implementation(self.kernel, query_BTNH, has_position_bias=self.position_bias is not None)
        return attend(
            query_BTNH,
            key_BKNH,
            value_BKNH,
            distance_KNH=distances.key_KNH,
            content_bias_NH=self.content_bias,
            position_bias_NH=self.position_bias,
            distance_bias_KN=distances.bias_KN,
            visible=visible,
            dropout=self.rate(),
        )


class AbsoluteAttention(Attention):
    """Plain scaled dot products: positions were added to the embedding."""

    def attend(
        self,
        query_BTNH: Tensor,
        key_BKNH: Tensor,
        value_BKNH: Tensor,
        *,
        distances: Distances | None,
        visible: Visibility,
    ) -> Tensor:
        """See `Attention`."""
        query, key, value = (x.transpose(1, 2) for x in (query_BTNH, key_BKNH, value_BKNH))
        # Not cuDNN's, whose backward gives NaN for some lengths with a mask (pytorch #196678), and torch would choose.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            context_BNTH = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible.mask()[:, None], dropout_p=self.rate()
            )
        return context_BNTH.transpose(1, 2)


def implementation(kernel: AttentionKernel, query: Tensor, *, has_position_bias: bool) -> Callable[..., Tensor]:
    """What computes attention like `relative_attention`, by the setting `engine.attention`.

    Raises ConfigError if the Triton kernels are asked for and cannot run.
    """
    obstacle = launch.obstacle(query, has_position_bias=has_position_bias) if kernel in ("auto", "triton") else None
    if kernel == "triton" and obstacle is not None:
        raise ConfigError(f'engine.attention = "triton" cannot run: {obstacle}. Set it to "auto" or "fused".')
    if kernel == "plain":
        return relative_attention
    uses_triton = kernel == "triton" or (kernel == "auto" and obstacle is None)
    return launch.triton_relative_attention if uses_triton else fused_relative_attention


class AttentionBiases(NamedTuple):
    """The biases that layers may share: u (content), and v (position) where the distances are sinusoids."""

    content_NH: nn.Parameter
    position_NH: nn.Parameter


def attention_biases(model: ModelSection) -> AttentionBiases:
    """Not yet initialised."""
    shape = (model.num_heads, model.head_width)
    return AttentionBiases(nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape)))


def build_attention(model: ModelSection, *, biases: AttentionBiases, kernel: AttentionKernel = "auto") -> Attention:
    """The attention layer that `model.positions` names; `kernel` computes relative ones."""
    content, position = biases
    if model.positions == "relative":
        distance = SinusoidalDistances(model)
        return RelativeAttention(
            model, distance=distance, content_bias_NH=content, position_bias_NH=position, kernel=kernel
        )
    if model.positions == "learned_relative":
        table = LearnedDistances(model)
        return RelativeAttention(model, distance=table, content_bias_NH=content, position_bias_NH=None, kernel=kernel)
    return AbsoluteAttention(model, distance=None)
