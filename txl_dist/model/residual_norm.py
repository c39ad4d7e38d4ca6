"""dropout + residual sum + norm: what stands behind each sublayer, as one kernel on a GPU in half precision.

`ResidualLayerNorm` and `ResidualRmsNorm` are the norms as modules, for post-norm, which goes on with what is normed,
and for pre-norm, which needs the sum too; `residual_sum` is the sum alone, where a pre-norm layer ends. Elsewhere,
and where the kernels cannot run (`kernels.rows.runs`), they are torch's operations, one after the other.

Shapes: hidden states of any shape [..., D]; R rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl_dist.model.dropout import dropout
from txl_dist.model.kernels import rows
from txl_dist.model.rms_norm import RmsNorm


class Drop(NamedTuple):
    """A dropout that is about to act."""

    rate: float
    by_kernel: bool = False
    """Whether a kernel makes it, with what stands around it."""
    seed: Tensor | None = None
    """Of a kernel's, unless the rate is 0."""


class ResidualLayerNorm(nn.LayerNorm):
    """Layer norm of a sum."""

    def forward(self, residual: Tensor, update: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(residual + dropout(update), that normed)."""
        if not drop.by_kernel:
            total = residual + dropout(update, drop.rate)
            return total, super().forward(total)
        return _by_kernel(residual, update, drop, self.weight, self.bias, self.eps)


class ResidualRmsNorm(RmsNorm):
    """`RmsNorm` of a sum."""

    def forward(self, residual: Tensor, update: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(residual + dropout(update), that normed)."""
        if not drop.by_kernel:
            total = residual + dropout(update, drop.rate)
            return total, super().forward(total)
        return _by_kernel(residual, update, drop, None, None, self.eps)


def residual_sum(residual: Tensor, update: Tensor, drop: Drop) -> Tensor:
    """residual + dropout(update)."""
    if not drop.by_kernel or drop.rate == 0:
        return residual + dropout(update, drop.rate)
    total: Tensor
    total, _ = _by_kernel(residual, update, drop, None, None, None)
    return total


def _by_kernel(
    residual: Tensor, update: Tensor, drop: Drop, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    outcome: tuple[Tensor, Tensor] = _ResidualNorm.apply(  # type: ignore[no-untyped-call]
        residual.contiguous(), update.contiguous(), weight, bias, drop.seed, rows.threshold_of(drop.rate), eps
    )
    return outcome


class _ResidualNorm(torch.autograd.Function):
    """(sum, normed); without `eps` nothing is normed, without `weight` by the root mean square."""

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
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        width = residual.shape[-1]
        num_rows, total = residual.numel() // width, torch.empty_like(residual)
        normed, mean, scale = None, None, None
        if eps is not None:
            normed, scale = torch.empty_like(residual), residual.new_empty(num_rows, dtype=torch.float32)
            mean = None if weight is None else torch.empty_like(scale)
        grid, sizes = _tiles(num_rows, width)
        outputs = (total, normed, mean, scale)
        rows.start(
            "residual_norm", (grid,), residual, update, weight, bias, seed, *outputs, num_rows, threshold, eps, **sizes
        )
        ctx.save_for_backward(None if eps is None else total, mean, scale, weight, seed)
        ctx.threshold = threshold
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, scale, weight, seed = ctx.saved_tensors
        d_sum, d_normed = (None if gradient is None else gradient.contiguous() for gradient in gradients)
        like = d_sum if d_normed is None else d_normed
        if like is None:
            return (None,) * 7
        width = like.shape[-1]
        num_rows = like.numel() // width
        tiles, sizes = _tiles(num_rows, width)
        programs = min(tiles, rows.MAX_PARTS)
        # Without a norm the gradient of the residual is that of the sum.
        d_residual = None if d_normed is None else torch.empty_like(like)
        d_update = None if seed is None else torch.empty_like(like)
        has_gains = d_normed is not None and weight is not None
        parts = like.new_empty(programs, 2, width, dtype=torch.float32) if has_gains else None
        if d_residual is not None or d_update is not None:
            kept = (total, mean, scale, weight, seed) if d_normed is not None else (None, None, None, None, seed)
            made = (d_residual, d_update, parts)
            arguments = (d_sum, d_normed, *kept, *made, num_rows, ctx.threshold)
            rows.start("residual_norm_gradients", (programs,), *arguments, **sizes)
        d_gains = (None, None) if parts is None else rows.summed(parts, dtype=weight.dtype).unbind(0)
        d_residual = d_sum if d_residual is None else d_residual
        return d_residual, d_residual if d_update is None else d_update, *d_gains, None, None, None


def _tiles(num_rows: int, width: int) -> tuple[int, dict[str, int]]:
    """How many tiles of rows there are, and how the kernels are compiled."""
    columns = max(16, 1 << (width - 1).bit_length())
    tile_rows = max(1, rows.TILE_LEN // columns)
    num_warps = 4 * max(1, columns // rows.TILE_LEN)
    return -(-num_rows // tile_rows), {"D": width, "BLOCK_D": columns, "ROWS": tile_rows, "num_warps": num_warps}
