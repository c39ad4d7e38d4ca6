"""One Transformer-XL layer: attention and a feed-forward network, each with dropout and a residual sum.

Layer norm stands after each sum (the paper) or before each sublayer (`pre_norm`). Memories are stored as the
layer's raw input, so pre-norm normalises them again when they are read, as the original code does.

Shapes: B lanes, T segment, M memory, K = M + T, D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from txl_dist.model.dropout import dropout, gelu_dropout, relu_dropout_
from txl_dist.model.memory import Visibility
from txl_dist.model.positions import AttentionBiases, build_attention
from txl_dist.sections import AttentionKernel, ModelSection

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"relu": relu_dropout_, "gelu": gelu_dropout}
"""Each with the dropout behind it, whose rate is 0 unless given; they may write over what they are given."""


class Block(nn.Module):
    """One layer, over a memory of hidden states. `infer.cached` runs its parts over keys and values made before."""

    def __init__(self, model: ModelSection, *, biases: AttentionBiases, kernel: AttentionKernel = "auto") -> None:
        super().__init__()
        self.pre_norm, self.activation = model.pre_norm, ACTIVATIONS[model.activation]
        self.projection_dropout, self.ff_dropout = model.rate(model.projection_dropout), model.rate(model.ff_dropout)
        self.attention = build_attention(model, biases=biases, kernel=kernel)
        self.attention_norm = nn.LayerNorm(model.width, eps=model.norm_eps)
        self.ff_in = nn.Linear(model.width, model.ff_width)
        self.ff_out = nn.Linear(model.ff_width, model.width)
        self.ff_norm = nn.LayerNorm(model.width, eps=model.norm_eps)

    def forward(
        self, hidden_BTD: Tensor, memory_BMD: Tensor, encoding_KD: Tensor | None, visible: Visibility
    ) -> Tensor:
        """The layer's output for a segment. Positional, because activation checkpointing passes positions.

        `encoding_KD` are the sinusoids of the distances K-1 ... 0, where the attention uses them.
        """
        distances = self.attention.distances(visible.num_keys, encoding_KD=encoding_KD)
        normed = self.attention_norm(hidden_BTD) if self.pre_norm else hidden_BTD
        # Memory and segment are projected apart: no gradient is computed for the memory's rows.
        key_value = _joined(self.project_key_value(memory_BMD), self.attention.project_key_value(normed))
        context = self.attention(normed, key_value_BK2NH=key_value, distances=distances, visible=visible)
        return self.finish(hidden_BTD, context)

    def project_key_value(self, hidden_BSD: Tensor) -> Tensor:
        """key_value_BS2NH of positions, given the layer's raw inputs there."""
        return self.attention.project_key_value(self.attention_norm(hidden_BSD) if self.pre_norm else hidden_BSD)

    def finish(self, hidden_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        """The layer's output, given its input and what its attention made of it."""
        hidden = hidden_BTD + self._drop(context_BTD, self.projection_dropout)
        if not self.pre_norm:
            hidden = self.attention_norm(hidden)
        # As a matrix, because what is written in place over a view has a backward pass that copies.
        inner = self.ff_in((self.ff_norm(hidden) if self.pre_norm else hidden).flatten(0, -2))
        inner = self.activation(inner, self.ff_dropout if self.training else 0.0)
        hidden = hidden + self._drop(self.ff_out(inner), self.ff_dropout).view_as(hidden)
        return hidden if self.pre_norm else self.ff_norm(hidden)

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        return dropout(x, rate) if self.training else x


def _joined(past_BM2NH: Tensor, new_BT2NH: Tensor) -> Tensor:
    """key_value_BK2NH, laid out as attention will read it, since a copy is made anyway: on a CPU by heads, on a GPU by
    positions, whose kernels take keys that lie apart."""
    if past_BM2NH.is_cuda:
        return torch.cat([past_BM2NH, new_BT2NH], dim=1)
    return torch.cat([x.permute(2, 3, 0, 1, 4) for x in (past_BM2NH, new_BT2NH)], dim=3).permute(2, 3, 0, 1, 4)
