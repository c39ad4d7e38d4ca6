"""Dropout, residual sum and norm after each sublayer, as one kernel on a GPU in half precision.

`ResidualLayerNorm` and `ResidualRmsNorm` return the sum and the normed sum. Post-norm uses only the normed sum, and
pre-norm uses the sum too. `residual_sum` returns only the sum, for the end of a pre-norm layer. Torch's operations
replace the kernel where it cannot run (see `kernels.rows.runs`).

The engine can pad hidden states by columns of zeros. A norm then divides by the width without them, and its results
have zeros there.

Shapes: hidden states of any shape [..., D], R rows of D numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from txl_dist.model.dropout import dropout
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.layer_norm import LayerNorm
from txl_dist.model.rms_norm import RmsNorm


class Drop(NamedTuple):
    """Description of one dropout: its rate, and whether a kernel applies it."""

    rate: float
    by_kernel: bool = False
    """True if a Triton kernel applies the dropout, together with the operations around it."""
    seed: Tensor | None = None
    """Seed for the kernel, int64 [1]. It is None if no kernel applies the dropout, or if the rate is 0."""


class ResidualLayerNorm(LayerNorm):
    """Module that adds a residual to a sublayer's output and applies layer norm to the sum."""

    def forward(self, residual: Tensor, update: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (residual + dropout(update), the layer norm of that sum)."""
        if not drop.by_kernel:
            total = residual + dropout(update, drop.rate)
            return total, super().forward(total)
        (width,) = self.normalized_shape
        return _by_kernel(residual, update, drop, self.weight, self.bias, self.eps, width=width)


class ResidualRmsNorm(RmsNorm):
    """Module that adds a residual to a sublayer's output and applies `RmsNorm` to the sum."""

    def forward(self, residual: Tensor, update: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (residual + dropout(update), the norm of that sum)."""
        if not drop.by_kernel:
            total = residual + dropout(update, drop.rate)
            return total, super().forward(total)
        return _by_kernel(residual, update, drop, None, None, self.eps, width=self.width)


def residual_sum(residual: Tensor, update: Tensor, drop: Drop) -> Tensor:
    """Compute the sum residual + dropout(update) without a norm."""
    if not drop.by_kernel or drop.rate == 0:
        return residual + dropout(update, drop.rate)
    total: Tensor
    total, _ = _by_kernel(residual, update, drop, None, None, None)
    return total


def _by_kernel(
    residual: Tensor,
    update: Tensor,
    drop: Drop,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (sum, normed sum) by the kernels. `_ResidualNorm` says which arguments may be None.

    `width` is the width of the rows without padding. None means that they are not padded.
    """
    threshold = attention_launch.threshold_of(drop.rate)
    total, normed = _ResidualNorm.apply(  # type: ignore[no-untyped-call]
        residual.contiguous(), update.contiguous(), weight, bias, drop.seed, threshold, eps, width
    )
    return total, normed


class _ResidualNorm(torch.autograd.Function):
    """Autograd function with results (sum, normed sum), by the kernels.

    If `eps` is None, there is no norm. If `weight` is None, the norm is a division by the root mean square. `count` is
    the number of columns without padding, or None for all columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        update: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        threshold: int,
        eps: float | None,
        count: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        width = residual.shape[-1]
        num_rows = residual.numel() // width
        total = torch.empty_like(residual)
        normed: Tensor | None = None
        mean: Tensor | None = None
        scale: Tensor | None = None
        if eps is not None:
            normed = torch.empty_like(residual)
            scale = residual.new_empty(num_rows, dtype=torch.float32)
            if weight is not None:
                mean = torch.empty_like(scale)
        num_tiles, constants = _tiles(num_rows, width, count)
        inputs = (residual, update, weight, bias, seed)
        outputs = (total, normed, mean, scale)
        rows.start("residual_norm", (num_tiles,), *inputs, *outputs, num_rows, threshold, eps, **constants)
        if eps is None:
            kept_total = None
        else:
            kept_total = total
        ctx.save_for_backward(kept_total, mean, scale, weight, seed)
        ctx.threshold = threshold
        ctx.count = count
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, scale, weight, seed = ctx.saved_tensors
        d_sum, d_normed = (None if gradient is None else gradient.contiguous() for gradient in gradients)
        if d_normed is None:
            like = d_sum
        else:
            like = d_normed
        if like is None:
            return (None,) * 8
        width = like.shape[-1]
        num_rows = like.numel() // width
        num_tiles, constants = _tiles(num_rows, width, ctx.count)
        num_programs = min(num_tiles, rows.MAX_PARTS)
        # Without a norm the gradient of the residual is the gradient of the sum.
        if d_normed is None:
            d_residual = None
        else:
            d_residual = torch.empty_like(like)
        # Without dropout the gradient of the update is the gradient of the residual.
        if seed is None:
            d_update = None
        else:
            d_update = torch.empty_like(like)
        parts: Tensor | None = None
        if d_normed is not None and weight is not None:
            parts = like.new_empty(num_programs, 2, width, dtype=torch.float32)
        if d_normed is None:
            total = mean = scale = weight = None
        if d_residual is not None or d_update is not None:
            inputs = (d_sum, d_normed, total, mean, scale, weight, seed)
            outputs = (d_residual, d_update, parts)
            rows.start(
                "residual_norm_gradients", (num_programs,), *inputs, *outputs, num_rows, ctx.threshold, **constants
            )
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        if parts is not None:
            d_weight, d_bias = rows.summed(parts, dtype=weight.dtype)
        if d_residual is None:
            d_residual = d_sum
        if d_update is None:
            d_update = d_residual
        return d_residual, d_update, d_weight, d_bias, None, None, None, None


def _tiles(num_rows: int, width: int, count: int | None) -> tuple[int, dict[str, int]]:
    """Return (number of tiles of rows, compile-time arguments of the kernels). `count` is that of `_ResidualNorm`."""
    columns = max(16, 1 << (width - 1).bit_length())
    tile_rows = max(1, rows.TILE_LEN // columns)
    num_tiles = math.ceil(num_rows / tile_rows)
    num_warps = 4 * max(1, columns // rows.TILE_LEN)
    widths = {"D": width, "COUNT": count or width, "BLOCK_D": columns}
    return num_tiles, {**widths, "ROWS": tile_rows, "num_warps": num_warps}
