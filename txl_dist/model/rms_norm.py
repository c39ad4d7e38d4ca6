"""Division by the root mean square (Zhang and Sennrich 2019), without gain and bias.

On a CPU torch composes it of a handful of operations, and its gradient of more; here both are few passes over numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_dist.model.relative_attention import at_least_fp32


def rms_norm(x: Tensor, *, eps: float, gain: float = 1.0) -> Tensor:
    """gain x / sqrt(mean of x^2 over the last dimension + eps)."""
    if x.is_cuda or not (torch.is_grad_enabled() and x.requires_grad):
        normed = F.rms_norm(x, x.shape[-1:], eps=eps)
        return normed if gain == 1.0 else normed * gain
    return _RmsNorm.apply(x, eps, gain)  # type: ignore[no-untyped-call, no-any-return]


class RmsNorm(nn.Module):
    """`rms_norm` of hidden states."""

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return rms_norm(x, eps=self.eps)


class _RmsNorm(torch.autograd.Function):
    """With r = 1 / rms: y = gain r x, dx = gain r (dy - r^2 x mean(dy x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gain: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32(x.dtype))
        ctx.gain, scale = gain, norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        return x * (scale * gain).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        mean = (d_y * x).mean(-1, keepdim=True, dtype=scale.dtype)
        d_x = d_y * (ctx.gain * scale).to(x.dtype)
        return d_x.addcmul_(x, (mean * scale**3).to(x.dtype), value=-ctx.gain), None, None
