"""The feed-forward network's first layer: bias, activation and dropout, as one kernel on a GPU in half precision.

Elsewhere, and where the kernels cannot run (`kernels.rows.runs`), they are torch's operations, one after the other.
swiglu, which is of two arguments, has no kernel.

Shapes: R rows, F their width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl_dist.model.dropout import gelu_dropout, relu2_dropout, relu_dropout_
from txl_dist.model.kernels import rows
from txl_dist.model.residual_norm import Drop

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": relu_dropout_,
    "gelu": gelu_dropout,
    "relu2": relu2_dropout,
}
"""Each with the dropout behind it, whose rate is 0 unless given; they may write over what they are given."""
TILE_COLUMNS = 128


class ActivatedLinear(nn.Linear):
    """dropout(activation(x W' + b)), b not being left out."""

    def __init__(self, num_in: int, num_out: int, *, activation: str) -> None:
        super().__init__(num_in, num_out)
        self.activation = activation

    def forward(self, x_RD: Tensor, drop: Drop) -> Tensor:  # type: ignore[override]
        """[R, F]."""
        if not drop.by_kernel:
            return ACTIVATIONS[self.activation](super().forward(x_RD), drop.rate)
        product_RF = F.linear(x_RD, self.weight)
        result: Tensor = _Activation.apply(  # type: ignore[no-untyped-call]
            product_RF, self.bias, drop.seed, rows.threshold_of(drop.rate), self.activation
        )
        return result


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    """x silu(gate) (Shazeer 2020)."""
    return x * F.silu(gate)


class _Activation(torch.autograd.Function):
    """As `ActivatedLinear`, of the product."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, bias: Tensor, seed: Tensor | None, threshold: int, activation: str
    ) -> Tensor:
        num_rows, result = len(product), torch.empty_like(product)
        row_tiles, column_tiles, constants = _tiles(product, activation)
        arguments = (product, bias, seed, result, num_rows, threshold)
        rows.start("activate", (row_tiles, column_tiles), *arguments, **constants)
        ctx.save_for_backward(*((result, None, None, None) if activation == "relu" else (None, product, bias, seed)))
        ctx.settings = threshold, activation, bias.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, product, bias, seed = ctx.saved_tensors
        threshold, activation, dtype = ctx.settings
        d_result = gradients[0].contiguous()
        row_tiles, column_tiles, constants = _tiles(d_result, activation)
        # Twice as many programs as hold whole rows: these take half as many registers.
        num_parts = min(row_tiles, -(-2 * rows.MAX_PARTS // column_tiles))
        d_product = torch.empty_like(d_result)
        parts = d_result.new_empty(num_parts, d_result.shape[1], dtype=torch.float32)
        arguments = (d_result, result, product, bias, seed, d_product, parts, len(d_result), threshold)
        rows.start("activation_gradients", (num_parts, column_tiles), *arguments, **constants)
        return d_product, rows.summed(parts, dtype=dtype), None, None, None


def _tiles(x_RF: Tensor, activation: str) -> tuple[int, int, dict[str, Any]]:
    """Tiles of rows and of columns, and how the kernels are compiled."""
    num_rows, width = x_RF.shape
    columns = min(TILE_COLUMNS, max(16, 1 << (width - 1).bit_length()))
    tile_rows = rows.TILE_LEN // columns
    constants = {"ACTIVATION": activation, "F": width, "ROWS": tile_rows, "COLUMNS": columns}
    return -(-num_rows // tile_rows), -(-width // columns), constants
