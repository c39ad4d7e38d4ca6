"""Dropout. On a CPU its masks come from few random words; on a GPU torch's own does it in one kernel.

On a CPU torch takes 8 ns for each Bernoulli number, in all a sixth of a training step. Here one call fills words of 64
bits, and every number takes 16 bits of them: it is kept if they, as an integer, lie below a bound. So rates are rounded
to multiples of 2 ** -16 (at least one of them; above 0.999 that is coarse), while what is kept is divided by 1 - rate
exactly. Masks come from
torch's default generator, and are a function of its state and of the shape.

All passes are made over one piece after the other, so short that it stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 16
PIECE = 2**17
"""Numbers; divisible by those that share a word."""


def torch_draws(x: Tensor) -> bool:
    """Whether torch's own dropout, which is one kernel on a GPU, is taken for `x`."""
    return x.is_cuda


def dropout(x: Tensor, rate: float) -> Tensor:
    """`x` with each number set to 0 with probability `rate` (0 <= rate < 1), and the others scaled to keep the mean."""
    if rate == 0:
        return x
    return torch.native_dropout(x, rate, True)[0] if torch_draws(x) else _Dropout.apply(x, rate)  # type: ignore[no-untyped-call]


def relu_dropout_(x: Tensor, rate: float = 0.0) -> Tensor:
    """dropout(relu(x), rate), in place of a contiguous `x`.

    On a CPU no mask is kept for the backward pass: a zero tells enough.
    """
    if rate == 0:
        return torch.relu_(x)
    if torch_draws(x):
        return torch.native_dropout(torch.relu_(x), rate, True)[0]
    return _ReluDropout.apply(x, rate)  # type: ignore[no-untyped-call, no-any-return]


def gelu_dropout(x: Tensor, rate: float = 0.0) -> Tensor:
    """dropout(gelu(x), rate)."""
    return dropout(F.gelu(x), rate)


def relu2_dropout(x: Tensor, rate: float = 0.0) -> Tensor:
    """dropout(relu(x) ** 2), written over `x` in between."""
    return dropout(torch.relu_(x).square(), rate)


def draw_kept_(keep: Tensor, rate: float) -> Tensor:
    """Draw 1 with probability 1 - rate or else 0, into contiguous int16 numbers [n] on a CPU, n % 4 == 0."""
    keep.view(torch.int64).random_(-(2**63), None)
    most = 2 ** (BITS - 1)
    return keep.lt_(min(round((1 - rate) * 2 * most) - most, most - 1))


def _room_for_mask(x: Tensor, *, most: int | None = None) -> Tensor:
    """int16 [n] for the n numbers of `x`, or `most` of them, and up to three more: whole words."""
    length = x.numel() if most is None else min(x.numel(), most)
    return torch.empty(math.ceil(length * BITS / 64) * 64 // BITS, dtype=torch.int16, device=x.device)


def _pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(x.view(-1).split(PIECE) for x in tensors), strict=True)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        x, keep, ctx.scale = x.contiguous(), _room_for_mask(x), 1 / (1 - rate)
        ctx.save_for_backward(keep)
        y = torch.empty_like(x)
        for x_n, y_n, keep_n in _pieces(x, y, keep):
            y_n.copy_(draw_kept_(keep_n, rate)[: len(x_n)]).mul_(x_n).mul_(ctx.scale)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (keep,), d_y = ctx.saved_tensors, d_y.contiguous()
        d_x = torch.empty_like(d_y)
        for d_y_n, d_x_n, keep_n in _pieces(d_y, d_x, keep):
            d_x_n.copy_(keep_n[: len(d_y_n)]).mul_(d_y_n).mul_(ctx.scale)
        return d_x, None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        assert x.is_contiguous()
        ctx.scale, keep = 1 / (1 - rate), _room_for_mask(x, most=PIECE)
        for (x_n,) in _pieces(x):
            x_n.relu_().mul_(draw_kept_(keep, rate)[: len(x_n)]).mul_(ctx.scale)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        (y,), d_y = ctx.saved_tensors, d_y.contiguous()
        d_x = torch.empty_like(d_y)
        for d_y_n, y_n, d_x_n in _pieces(d_y, y, d_x):
            torch.ops.aten.threshold_backward.grad_input(d_y_n, y_n, 0, grad_input=d_x_n).mul_(ctx.scale)
        return d_x, None
