"""Dropout whose masks need few random words on a CPU. On a GPU it is torch's own dropout, which is one kernel.

On a CPU torch takes 8 ns to draw one Bernoulli number. Drawing all masks in this way would take a sixth of a training
step. Here one call fills 64-bit random words, and every number of the tensor uses 16 bits. A number is kept if its 16
bits, as an integer, are below a bound. So rates are rounded to multiples of 2**-16, and the smallest rate is 2**-16.
Rates above 0.999 are rounded coarsely. Kept numbers are divided by the exact 1 - rate. Masks come from torch's default
generator. A mask depends only on the generator's state and on the tensor's shape.

Tensors are processed in pieces that fit the CPU's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 16
"""Number of random bits that decide whether one value is kept."""
WORD_LEN = 64 // BITS
"""Number of values whose random bits come from one 64-bit word."""
PIECE = 2**17
"""Number of values that are processed at a time, a multiple of WORD_LEN."""


def torch_draws(x: Tensor) -> bool:
    """Return True if torch's own dropout is used for `x`. It is used on a GPU, where it is one kernel."""
    return x.is_cuda


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set each number of a tensor to 0 with probability `rate`, and divide the other numbers by 1 - rate.

    The rate must satisfy 0 <= rate < 1.
    """
    if rate == 0:
        return x
    if torch_draws(x):
        return torch.native_dropout(x, rate, True)[0]
    return _Dropout.apply(x, rate)  # type: ignore[no-untyped-call, no-any-return]


def relu_dropout_(x: Tensor, rate: float = 0.0) -> Tensor:
    """Compute dropout(relu(x), rate) in place. The tensor `x` must be contiguous.

    On a CPU no mask is kept for the backward pass, because the result is 0 wherever the gradient is 0.
    """
    if rate == 0:
        return torch.relu_(x)
    if torch_draws(x):
        return torch.native_dropout(torch.relu_(x), rate, True)[0]
    return _ReluDropout.apply(x, rate)  # type: ignore[no-untyped-call, no-any-return]


def gelu_dropout(x: Tensor, rate: float = 0.0) -> Tensor:
    """Apply the activation gelu to x, then dropout with probability `rate`."""
    return dropout(F.gelu(x), rate)


def relu2_dropout(x: Tensor, rate: float = 0.0) -> Tensor:
    """Compute dropout(relu(x) ** 2, rate). The tensor `x` is overwritten by relu(x)."""
    squared = torch.relu_(x).square()
    return dropout(squared, rate)


def draw_kept_(keep: Tensor, rate: float, *, dtype: torch.dtype) -> None:
    """Draw a mask into `keep`, for numbers of type `dtype`: 1 with probability 1 - rate, else 0.

    The tensor `keep` is contiguous int16 [n] on a CPU, and n is a multiple of WORD_LEN. For a half-precision type it
    gets the bits of 1.0 in that type in place of 1.
    """
    words = keep.view(torch.int64)
    words.random_(-(2**63), None)
    # As int16 the random bits are in [-most, most).
    most = 2 ** (BITS - 1)
    bound = round((1 - rate) * 2 * most) - most
    keep.lt_(min(bound, most - 1))
    if dtype.itemsize == 2:
        keep.mul_(torch.ones((), dtype=dtype).view(torch.int16))


def _drop(x: Tensor, keep: Tensor, scale: float, *, out: Tensor) -> None:
    """Write x * scale to `out` where the mask `keep` is set, else 0. `out` can be `x`.

    `draw_kept_` has made the mask. It can be longer than x.
    """
    keep = keep[: len(x)]
    if x.dtype.itemsize == 2:
        _scale_where_positive(keep.view(x.dtype), x, scale, out=out)
    elif out is x:
        x.mul_(keep).mul_(scale)
    else:
        out.copy_(keep)
        out.mul_(x).mul_(scale)


def _scale_where_positive(gate: Tensor, x: Tensor, scale: float, *, out: Tensor) -> None:
    """Write x * scale to `out` where `gate` is positive, else 0. All tensors have the same half-precision type.

    Torch's only operation that does this in one pass is the gradient of elu, here with slope 0 below zero. Each product
    in half precision would convert all numbers to fp32 and back.
    """
    torch.ops.aten.elu_backward.grad_input(x, 0.0, scale, 0.0, True, gate, grad_input=out)


def _room_for_mask(x: Tensor, *, most: int | None = None) -> Tensor:
    """Allocate an int16 mask with one number for each number of `x`, but at most `most` numbers.

    The mask's length is rounded up to whole 64-bit words of random bits.
    """
    if most is None:
        length = x.numel()
    else:
        length = min(x.numel(), most)
    num_words = math.ceil(length * BITS / 64)
    return torch.empty(num_words * WORD_LEN, dtype=torch.int16, device=x.device)


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split flat views of contiguous tensors into pieces. Yields the n-th pieces of all tensors together."""
    splits = [x.view(-1).split(PIECE) for x in tensors]
    return zip(*splits, strict=True)


class _Dropout(torch.autograd.Function):
    """Autograd function of `dropout` on a CPU. It keeps the mask for the backward pass, with 16 bits per number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        x = x.contiguous()
        keep = _room_for_mask(x)
        ctx.scale = 1 / (1 - rate)
        ctx.save_for_backward(keep)
        y = torch.empty_like(x)
        for x_n, y_n, keep_n in _pieces(x, y, keep):
            draw_kept_(keep_n, rate, dtype=x.dtype)
            _drop(x_n, keep_n, ctx.scale, out=y_n)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch.empty_like(d_y)
        for d_y_n, d_x_n, keep_n in _pieces(d_y, d_x, keep):
            _drop(d_y_n, keep_n, ctx.scale, out=d_x_n)
        return d_x, None


class _ReluDropout(torch.autograd.Function):
    """Autograd function of `relu_dropout_` on a CPU. It keeps the result for the backward pass, instead of a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        assert x.is_contiguous()
        ctx.scale = 1 / (1 - rate)
        keep = _room_for_mask(x, most=PIECE)
        for (x_n,) in _pieces(x):
            draw_kept_(keep, rate, dtype=x.dtype)
            x_n.relu_()
            _drop(x_n, keep, ctx.scale, out=x_n)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch.empty_like(d_y)
        relu_backward = torch.ops.aten.threshold_backward.grad_input
        for d_y_n, y_n, d_x_n in _pieces(d_y, y, d_x):
            if d_y.dtype.itemsize == 2:
                _scale_where_positive(y_n, d_y_n, ctx.scale, out=d_x_n)
            else:
                relu_backward(d_y_n, y_n, 0, grad_input=d_x_n)
                d_x_n.mul_(ctx.scale)
        return d_x, None
