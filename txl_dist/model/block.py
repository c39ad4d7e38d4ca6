"""One Transformer-XL layer: attention and a feed-forward network, each with dropout and a residual sum.

Layer norm stands after each sum (the paper) or before each sublayer (`pre_norm`). Memories are stored as the
layer's raw input, so pre-norm normalises them again when they are read, as the original code does.

Shapes: B lanes, T segment, M memory, K = M + T, D model width, N heads, H head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.model.activation import ActivatedLinear, swiglu
from txl_dist.model.dropout import dropout
from txl_dist.model.kernels import rows
from txl_dist.model.memory import AttentionMask
from txl_dist.model.positions import AttentionBiases, build_attention
from txl_dist.model.residual_norm import Drop, ResidualLayerNorm, ResidualRmsNorm, residual_sum
from txl_dist.model.rms_norm import RmsNorm


def build_norm(model: ModelSection) -> nn.Module:
    """The norm that `model.norm` names."""
    if model.norm == "rms":
        return RmsNorm(eps=model.norm_eps)
    return nn.LayerNorm(model.width, eps=model.norm_eps)


def build_residual_norm(model: ModelSection) -> nn.Module:
    """The same of a residual sum."""
    if model.norm == "rms":
        return ResidualRmsNorm(eps=model.norm_eps)
    return ResidualLayerNorm(model.width, eps=model.norm_eps)


class ResidualMix(nn.Module):
    """lambda x + mu x0: what a block is given (`model.residual_scalars`)."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.empty(2))

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        """x and x0 of any shape."""
        scales = self.scales.to(hidden.dtype)
        return scales[0] * hidden + scales[1] * first


class Block(nn.Module):
    """One layer, over a memory of hidden states. `infer.cached` runs its parts over keys and values made before."""

    def __init__(
        self, model: ModelSection, *, biases: AttentionBiases, is_first: bool = True, kernel: AttentionKernel = "auto"
    ) -> None:
        super().__init__()
        self.pre_norm, self.activation, self.kernel = model.pre_norm, model.activation, kernel
        self.projection_dropout, self.ff_dropout = model.rate(model.projection_dropout), model.rate(model.ff_dropout)
        self.gives_values = model.value_residual and is_first
        mixes_values = model.value_residual and not is_first
        self.attention = build_attention(model, biases=biases, mixes_values=mixes_values, kernel=kernel)
        self.attention_norm = build_norm(model) if model.pre_norm else build_residual_norm(model)
        is_gated = model.activation == "swiglu"
        self.ff_in = (nn.Linear if is_gated else partial(ActivatedLinear, activation=model.activation))(
            model.width, model.ff_width
        )
        self.ff_gate = nn.Linear(model.width, model.ff_width) if is_gated else None
        self.ff_out = nn.Linear(model.ff_width, model.width)
        self.ff_norm = build_residual_norm(model)

    def forward(
        self,
        hidden_BTD: Tensor,
        memory_BMD: Tensor,
        encoding_KD: Tensor | None,
        visible: AttentionMask,
        first_value_BKNH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output for a segment, and the first layer's values for the next one, where they are mixed.
        Positional, because activation checkpointing passes positions.

        `encoding_KD` are the sinusoids of the distances K-1 ... 0, where the attention uses them.
        """
        distances = self.attention.distances(visible.num_keys, encoding_KD=encoding_KD)
        normed = self.attention_norm(hidden_BTD) if self.pre_norm else hidden_BTD
        # Memory and segment are projected apart: no gradient is computed for the memory's rows.
        normed_past = self.attention_norm(memory_BMD) if self.pre_norm else memory_BMD
        if not self.gives_values and self.attention.supports_fused_qkv(normed):
            context = self.attention(normed, past_BMD=normed_past, distances=distances, visible=visible)
            return self.finish(hidden_BTD, context), first_value_BKNH
        key, value = _Joined.apply(  # type: ignore[no-untyped-call]
            self.attention.project_key_value(normed_past), self.attention.project_key_value(normed)
        )
        key, value = self.attention.prepare_kv(key, value, _last(first_value_BKNH, key.shape[1]))
        context = self.attention(normed, key_BKNH=key, value_BKNH=value, distances=distances, visible=visible)
        return self.finish(hidden_BTD, context), value if self.gives_values else first_value_BKNH

    def project_key_value(self, hidden_BSD: Tensor, first_value_BSNH: Tensor | None = None) -> Tensor:
        """key_value_BS2NH of positions as they are attended to, given the layer's raw inputs there, and the first
        layer's values."""
        normed = self.attention_norm(hidden_BSD) if self.pre_norm else hidden_BSD
        first_value_BSNH = _last(first_value_BSNH, hidden_BSD.shape[1])
        return self.attention.prepare_fused_kv(self.attention.project_key_value(normed), first_value_BSNH)

    def finish(self, hidden_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        """The layer's output, given its input and what its attention made of it."""
        behind_attention, inside, behind = self._drops(hidden_BTD)
        if self.pre_norm:
            hidden, given = self.ff_norm(hidden_BTD, context_BTD, behind_attention)
        else:
            hidden = given = self.attention_norm(hidden_BTD, context_BTD, behind_attention)[1]
        # As a matrix, because what is written in place over a view has a backward pass that copies.
        given = given.flatten(0, -2)
        if self.ff_gate is None:
            inner = self.ff_in(given, inside)
        else:
            inner = dropout(swiglu(self.ff_in(given), self.ff_gate(given)), inside.rate)
        update = self.ff_out(inner).view_as(hidden)
        return residual_sum(hidden, update, behind) if self.pre_norm else self.ff_norm(hidden, update, behind)[1]

    def _drops(self, hidden: Tensor) -> list[Drop]:
        """Behind attention, inside of the feed-forward network and behind it."""
        places = (self.projection_dropout, self.ff_dropout, self.ff_dropout)
        rates, by_kernel = places if self.training else (0.0, 0.0, 0.0), rows.runs(self.kernel, hidden)
        if not by_kernel or not any(rates):
            return [Drop(rate, by_kernel) for rate in rates]
        seeds = rows.draw_seeds(3, like=hidden)
        return [Drop(rate, True, seed if rate else None) for rate, seed in zip(rates, seeds, strict=True)]


def _last(first_value_BSNH: Tensor | None, num_positions: int) -> Tensor | None:
    """Of a first layer that remembers more than this one. Where it does not, no slice: its gradient is a copy."""
    if first_value_BSNH is None or first_value_BSNH.shape[1] == num_positions:
        return first_value_BSNH
    return first_value_BSNH[:, -num_positions:]


class _Joined(torch.autograd.Function):
    """(key, value) [B, K, N, H] of the memory, then of the segment, laid out as attention will read them, since a copy
    is made anyway: on a CPU by heads, on a GPU by positions, whose kernels take keys that lie apart.

    Their gradients are copied once, into the order of the products: autograd would join both first.
    """

    @staticmethod
    def forward(ctx: Any, past_BM2NH: Tensor, new_BT2NH: Tensor) -> tuple[Tensor, ...]:
        ctx.lengths = past_BM2NH.shape[1], new_BT2NH.shape[1]
        if past_BM2NH.is_cuda:
            return torch.cat([past_BM2NH, new_BT2NH], dim=1).unbind(2)
        by_heads = torch.cat([x.permute(2, 3, 0, 1, 4) for x in (past_BM2NH, new_BT2NH)], dim=3)
        return by_heads.permute(2, 3, 0, 1, 4).unbind(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        d_key, d_value = (gradient.split(ctx.lengths, dim=1) for gradient in gradients)
        return tuple(torch.stack(pair, dim=2) for pair in zip(d_key, d_value, strict=True))
