"""Layer norm whose gradients are summed in fp32 on a CPU in half precision, and torch's own layer norm elsewhere.

On a CPU torch's layer norm sums the gradients of its weight and bias over all rows in the type of the rows. In bf16 and
over 2,048 rows such a sum can be wrong by 5 %. Here these sums are matrix products, which sum in fp32.

Shapes: hidden states of any shape [..., D], R rows of D numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, with weight and bias. Rows, weight and bias can be padded by columns of
    zeros, and `normalized_shape` is their width without the padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows of `x`, in the type of `x`. Padding stays 0."""
        (width,) = self.normalized_shape
        if x.shape[-1] == width:
            return _normed(x, self.weight, self.bias, self.eps)
        normed = _normed(x[..., :width].contiguous(), self.weight[:width], self.bias[:width], self.eps)
        return with_zero_columns(normed, x.shape[-1])


def with_zero_columns(x: Tensor, width: int) -> Tensor:
    """Return x [..., D] with columns of zeros at the end, [..., width]."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the normed rows of `x`, in the type of `x`."""
    if x.is_cuda or x.dtype.itemsize != 2:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    normed: Tensor = _HalfLayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return normed


class _HalfLayerNorm(torch.autograd.Function):
    """Autograd function of layer norm in half precision on a CPU. Means and deviations are fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        width = list(weight.shape)
        normed, mean, scale = torch.native_layer_norm(x, width, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, mean, scale, weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_normed: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, scale, weight = ctx.saved_tensors
        wide = weight.float()
        only_x = [True, False, False]
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            d_normed.contiguous(), x, list(weight.shape), mean, scale, wide, wide, only_x
        )
        # The weight's gradient is the sum over rows of (x - mean) * scale * d_normed. The mean is subtracted in two
        # parts, because a difference of two large sums would lose all digits where the mean is large.
        d_normed_RD = d_normed.flatten(0, -2)
        scale_R = scale.flatten()
        near = mean.to(x.dtype)
        rest_R = (mean - near).flatten() * scale_R
        rows_2R = torch.stack([torch.ones_like(scale_R), rest_R]).to(x.dtype)
        d_bias, shifted = rows_2R @ d_normed_RD
        scaled_1D = scale_R[None].to(x.dtype) @ ((x - near).flatten(0, -2) * d_normed_RD)
        return d_x, scaled_1D[0] - shifted, d_bias, None
