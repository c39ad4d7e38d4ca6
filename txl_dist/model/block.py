"""One Transformer-XL layer: attention and a feed-forward network, each with dropout and a residual sum.

A layer norm follows each sum, as in Dai et al. 2019, or precedes each sublayer (`pre_norm`). A memory stores the
layer's input before any norm. So with `pre_norm` the memory is normalised again whenever it is read, as in the original
code.

Shapes: B lanes, T segment, M memory, K = M + T, D model width, N heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from txl_dist.config.schema import AttentionKernel, ModelSection
from txl_dist.model.activation import ActivatedLinear, swiglu
from txl_dist.model.dropout import dropout
from txl_dist.model.kernels import rows
from txl_dist.model.layer_norm import LayerNorm
from txl_dist.model.memory import AttentionMask
from txl_dist.model.positions import AttentionBiases, build_attention
from txl_dist.model.prediction_order import OrderedMask
from txl_dist.model.residual_norm import Drop, ResidualLayerNorm, ResidualRmsNorm, residual_sum
from txl_dist.model.rms_norm import RmsNorm


def build_norm(model: ModelSection) -> nn.Module:
    """Build the norm of hidden states that the setting `model.norm` names."""
    if model.norm == "rms":
        return RmsNorm(eps=model.norm_eps, width=model.width)
    return LayerNorm(model.width, eps=model.norm_eps)


def build_residual_norm(model: ModelSection) -> nn.Module:
    """Build the module that adds a residual and norms the sum. The setting `model.norm` names the norm."""
    if model.norm == "rms":
        return ResidualRmsNorm(eps=model.norm_eps, width=model.width)
    return ResidualLayerNorm(model.width, eps=model.norm_eps)


class ResidualMix(nn.Module):
    """Learned mix of a block's input x and the embedding's output x0: lambda x + mu x0 (`model.residual_scalars`)."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.empty(2))

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        """Return lambda x + mu x0. Here x is `hidden` and x0 is `first`, of the same shape."""
        scales = self.scales.to(hidden.dtype)
        return scales[0] * hidden + scales[1] * first


class Block(nn.Module):
    """One Transformer-XL layer. It attends over a segment and a memory of earlier hidden states.

    `inference.kv_cache` calls the block's methods with cached keys and values in place of the memory.
    """

    def __init__(
        self, model: ModelSection, *, biases: AttentionBiases, is_first: bool = True, kernel: AttentionKernel = "auto"
    ) -> None:
        super().__init__()
        self.pre_norm = model.pre_norm
        self.activation = model.activation
        self.kernel = kernel
        self.projection_dropout = model.rate(model.projection_dropout)
        self.ff_dropout = model.rate(model.ff_dropout)
        self.gives_values = model.value_residual and is_first
        mixes_values = model.value_residual and not is_first
        self.attention = build_attention(model, biases=biases, mixes_values=mixes_values, kernel=kernel)
        if model.pre_norm:
            self.attention_norm = build_norm(model)
        else:
            self.attention_norm = build_residual_norm(model)
        self.ff_in: nn.Linear
        self.ff_gate: nn.Linear | None = None
        if model.activation == "swiglu":
            self.ff_in = nn.Linear(model.width, model.ff_width)
            self.ff_gate = nn.Linear(model.width, model.ff_width)
        else:
            self.ff_in = ActivatedLinear(model.width, model.ff_width, activation=model.activation)
        self.ff_out = nn.Linear(model.ff_width, model.width)
        self.ff_norm = build_residual_norm(model)

    def forward(
        self,
        hidden_BTD: Tensor,
        memory_BMD: Tensor,
        encoding_KD: Tensor | None,
        visible: AttentionMask | OrderedMask,
        first_value_BKNH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (the layer's output for a segment, the first layer's values).

        The second item is None unless later layers mix the first layer's values into their own values. The arguments
        are positional, because activation checkpointing passes arguments by position. `encoding_KD` holds the sinusoids
        of the distances K-1 ... 0, or is None if attention does not use sinusoids.

        If the model predicts in any order (XLNet), the distances continue to 1-T. The input then has query rows after
        the T rows of the segment. Query rows have no keys and values.
        """
        distances = self.attention.distances(visible.num_distances, encoding_KD=encoding_KD)
        if self.pre_norm:
            normed = self.attention_norm(hidden_BTD)
        else:
            normed = hidden_BTD
        # Memory and segment are projected separately, so no gradient is computed for the memory's rows.
        if self.pre_norm:
            normed_past = self.attention_norm(memory_BMD)
        else:
            normed_past = memory_BMD
        in_any_order = isinstance(visible, OrderedMask)
        own = normed
        if in_any_order:
            own = normed[:, : visible.segment_len]  # query rows have no keys and values
        if not self.gives_values and not in_any_order and self.attention.supports_fused_qkv(normed):
            context = self.attention(normed, past_BMD=normed_past, distances=distances, visible=visible)
            return self.finish(hidden_BTD, context), first_value_BKNH
        # The products have no names here, so that they are freed as soon as they are joined.
        key, value = _Joined.apply(  # type: ignore[no-untyped-call]
            self.attention.project_key_value(normed_past),
            self.attention.project_key_value(own),
        )
        first_value = _last(first_value_BKNH, key.shape[1])
        key, value = self.attention.prepare_kv(key, value, first_value)
        context = self.attention(normed, key_BKNH=key, value_BKNH=value, distances=distances, visible=visible)
        output = self.finish(hidden_BTD, context)
        return output, value if self.gives_values else first_value_BKNH

    def project_key_value(self, hidden_BSD: Tensor, first_value_BSNH: Tensor | None = None) -> Tensor:
        """Compute the keys and values of any positions, key_value_BS2NH, ready for attention.

        `hidden_BSD` holds the layer's raw inputs at these positions. `first_value_BSNH` holds the first layer's values
        there, or is None.
        """
        if self.pre_norm:
            normed = self.attention_norm(hidden_BSD)
        else:
            normed = hidden_BSD
        first_value_BSNH = _last(first_value_BSNH, hidden_BSD.shape[1])
        key_value_BS2NH = self.attention.project_key_value(normed)
        return self.attention.prepare_fused_kv(key_value_BS2NH, first_value_BSNH)

    def finish(self, hidden_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        """Compute the layer's output from its input and its attention's output.

        The computation includes the residual sums, the norms and the feed-forward network.
        """
        attention_drop, inner_drop, output_drop = self._drops(hidden_BTD)
        if self.pre_norm:
            hidden, ff_input = self.ff_norm(hidden_BTD, context_BTD, attention_drop)
        else:
            _, hidden = self.attention_norm(hidden_BTD, context_BTD, attention_drop)
            ff_input = hidden
        # As a matrix, because an operation in place on a view has a backward pass that copies.
        ff_input = ff_input.flatten(0, -2)
        if isinstance(self.ff_in, ActivatedLinear) and inner_drop.by_kernel and not self.pre_norm:
            ff_input, inner = self.ff_in.beside_residual(ff_input, inner_drop)
            hidden = ff_input.view_as(hidden)
        elif self.ff_gate is None:
            inner = self.ff_in(ff_input, inner_drop)
        else:
            inner = swiglu(self.ff_in(ff_input), self.ff_gate(ff_input))
            inner = dropout(inner, inner_drop.rate)
        update = self.ff_out(inner).view_as(hidden)
        if self.pre_norm:
            return residual_sum(hidden, update, output_drop)
        output: Tensor
        _, output = self.ff_norm(hidden, update, output_drop)
        return output

    def _drops(self, hidden: Tensor) -> list[Drop]:
        """Return the block's three dropouts.

        They are applied after attention, inside the feed-forward network, and after the feed-forward network.
        """
        rates = (0.0, 0.0, 0.0)
        if self.training:
            rates = (self.projection_dropout, self.ff_dropout, self.ff_dropout)
        by_kernel = rows.runs(self.kernel, hidden)
        if not by_kernel or not any(rates):
            return [Drop(rate, by_kernel) for rate in rates]
        seeds = rows.draw_seeds(3, like=hidden)
        drops = []
        for rate, seed in zip(rates, seeds, strict=True):
            drops.append(Drop(rate, True, seed if rate else None))
        return drops


def _last(first_value_BSNH: Tensor | None, num_positions: int) -> Tensor | None:
    """Return the first layer's values at the last `num_positions` positions.

    A layer that remembers fewer positions than the first layer uses only these values. Values of the right length are
    returned without a slice, because the gradient of a slice is a copy.
    """
    if first_value_BSNH is None or first_value_BSNH.shape[1] == num_positions:
        return first_value_BSNH
    return first_value_BSNH[:, -num_positions:]


class _Joined(torch.autograd.Function):
    """Autograd function that joins the keys and values of the memory and of the segment.

    The results are the keys and the values, [B, K, N, H] each, in the layout that attention reads.

    Joining needs a copy, and the copy also sets the layout of the result in memory. On a CPU the layout is by heads. On
    a GPU it is by positions, because the kernels there accept strided keys. The backward pass copies the gradients
    once, into the layout of the projections' results. Autograd's own backward pass would copy them twice.
    """

    @staticmethod
    def forward(ctx: Any, past_BM2NH: Tensor, new_BT2NH: Tensor) -> tuple[Tensor, ...]:
        ctx.lengths = past_BM2NH.shape[1], new_BT2NH.shape[1]
        if past_BM2NH.is_cuda:
            return torch.cat([past_BM2NH, new_BT2NH], dim=1).unbind(2)
        past_2NBMH = past_BM2NH.permute(2, 3, 0, 1, 4)
        new_2NBTH = new_BT2NH.permute(2, 3, 0, 1, 4)
        by_heads = torch.cat([past_2NBMH, new_2NBTH], dim=3)
        return by_heads.permute(2, 3, 0, 1, 4).unbind(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        d_key, d_value = gradients
        d_past_key, d_new_key = d_key.split(ctx.lengths, dim=1)
        d_past_value, d_new_value = d_value.split(ctx.lengths, dim=1)
        d_past_BM2NH = torch.stack([d_past_key, d_past_value], dim=2)
        d_new_BT2NH = torch.stack([d_new_key, d_new_value], dim=2)
        return d_past_BM2NH, d_new_BT2NH
