"""Division by the root mean square (Zhang and Sennrich 2019), without gain and bias.

On a CPU torch's own `rms_norm` and its gradient consist of many operations. Here the norm and its gradient need few
passes over the numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.model.relative_attention import at_least_fp32


def rms_norm(x: Tensor, *, eps: float, gain: float = 1.0, width: int | None = None) -> Tensor:
    """Compute gain x / sqrt(mean of x^2 + eps). The mean is over the last dimension.

    If the last dimension is padded by zeros, `width` is its size without them. The mean is then over `width` values.
    """
    if width is not None and width != x.shape[-1]:
        # The mean below divides by the padded size.
        share = width / x.shape[-1]
        eps *= share
        gain *= math.sqrt(share)
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    if x.is_cuda or not needs_gradient:
        normed = F.rms_norm(x, x.shape[-1:], eps=eps)
        if gain == 1.0:
            return normed
        return normed * gain
    return _RmsNorm.apply(x, eps, gain)  # type: ignore[no-untyped-call, no-any-return]


class RmsNorm(nn.Module):
    """Module that applies `rms_norm` to hidden states. `width` is their width without padding."""

    def __init__(self, *, eps: float, width: int | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Norm hidden states of any shape over the last dimension."""
        return rms_norm(x, eps=self.eps, width=self.width)


class _RmsNorm(torch.autograd.Function):
    """Autograd function of `rms_norm`. With r = 1 / rms: y = gain r x, dx = gain r (dy - r^2 x mean(dy x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gain: float) -> Tensor:
        dtype = at_least_fp32(x.dtype)
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        mean_square = norm.square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.gain = gain
        ctx.save_for_backward(x, scale)
        factor = (scale * gain).to(x.dtype)
        return x * factor

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        mean = (d_y * x).mean(-1, keepdim=True, dtype=scale.dtype)
        factor = (ctx.gain * scale).to(x.dtype)
        d_x = d_y * factor
        along_x = (mean * scale**3).to(x.dtype)
        d_x.addcmul_(x, along_x, value=-ctx.gain)
        return d_x, None, None
