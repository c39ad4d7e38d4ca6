"""Layer norm whose gradients are summed in fp32 on a CPU in half precision, and torch's own layer norm elsewhere.

On a CPU torch's layer norm sums the gradients of its weight and bias over all rows in the type of the rows. In bf16 and
over 2,048 rows such a sum can be wrong by 5 %. Here these sums are matrix products, which sum in fp32.

Shapes: hidden states of any shape [..., D], R rows of D numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, with weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows of `x`, in the type of `x`."""
        if x.is_cuda or x.dtype.itemsize != 2:
            return super().forward(x)
        normed: Tensor = _HalfLayerNorm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
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
        # The weight's gradient is the sum over rows of (x - mean) * scale * d_normed.
        d_normed_RD = d_normed.flatten(0, -2)
        scale_R = scale.flatten()
        shift_R = mean.flatten() * scale_R
        rows_2R = torch.stack([torch.ones_like(scale_R), shift_R]).to(x.dtype)
        d_bias, shifted = rows_2R @ d_normed_RD
        scaled_1D = scale_R[None].to(x.dtype) @ (x.flatten(0, -2) * d_normed_RD)
        return d_x, scaled_1D[0] - shifted, d_bias, None
