"""One Transformer-XL layer: relative attention and a feed-forward network, each with dropout and a residual sum.

Layer norm stands after each sum (the paper) or before each sublayer (`pre_norm`). Memories are stored as the
layer's raw input, so pre-norm normalises them again when they are read, as the original code does.

Shapes: B lanes, T segment, M memory, K = M + T, D model width, N heads, H head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.model.relative_attention import RelativeAttention
from txl_dist.sections import ModelSection


class Block(nn.Module):
    """One layer. `forward` reads a memory of hidden states; `forward_cached` reads keys and values made before."""

    def __init__(self, model: ModelSection, *, content_bias_NH: nn.Parameter, position_bias_NH: nn.Parameter) -> None:
        super().__init__()
        self.pre_norm, self.dropout = model.pre_norm, model.dropout
        self.attention = RelativeAttention(model, content_bias_NH=content_bias_NH, position_bias_NH=position_bias_NH)
        self.attention_norm = nn.LayerNorm(model.width)
        self.ff_in = nn.Linear(model.width, model.ff_width)
        self.ff_out = nn.Linear(model.ff_width, model.width)
        self.ff_norm = nn.LayerNorm(model.width)

    def forward(self, hidden_BTD: Tensor, memory_BMD: Tensor, distance_KD: Tensor, visible_BTK: Tensor) -> Tensor:
        """The layer's output for a segment. Positional, because activation checkpointing passes positions."""
        past_BM2NH = self.project_key_value(memory_BMD)
        hidden_BTD, _ = self.forward_cached(
            hidden_BTD,
            past_BM2NH=past_BM2NH,
            distance_KNH=self.attention.project_distance(distance_KD),
            visible_BTK=visible_BTK,
        )
        return hidden_BTD

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """Keys and values of positions, given the layer's raw inputs there."""
        return self.attention.project_key_value(self.attention_norm(hidden_BSD) if self.pre_norm else hidden_BSD)

    def forward_cached(
        self, hidden_BTD: Tensor, *, past_BM2NH: Tensor, distance_KNH: Tensor, visible_BTK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output for a segment and the keys and values of past and segment, for the caller to keep."""
        normed = self.attention_norm(hidden_BTD) if self.pre_norm else hidden_BTD
        # Memory and segment are projected apart: no gradient is computed for the memory's rows.
        key_value = torch.cat([past_BM2NH, self.attention.project_key_value(normed)], dim=1)
        context = self.attention(normed, key_value_BK2NH=key_value, distance_KNH=distance_KNH, visible_BTK=visible_BTK)
        hidden = hidden_BTD + self._drop(context)
        if not self.pre_norm:
            hidden = self.attention_norm(hidden)
        inner = self._drop(F.relu(self.ff_in(self.ff_norm(hidden) if self.pre_norm else hidden)))
        hidden = hidden + self._drop(self.ff_out(inner))
        return hidden if self.pre_norm else self.ff_norm(hidden), key_value

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
