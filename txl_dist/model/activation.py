"""First linear layer of the feed-forward network, with its activation and dropout.

On a GPU in half precision, one Triton kernel adds the layer's bias and applies the activation and the dropout. Torch's
operations replace the kernel where it cannot run (see `kernels.rows.runs`). The activation swiglu always uses torch's
operations, because it has two arguments.

Shapes: R rows (one per token), F width of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl_dist.model.dropout import gelu_dropout, relu2_dropout, relu_dropout_
from txl_dist.model.kernels import attention_launch, rows
from txl_dist.model.residual_norm import Drop

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": relu_dropout_,
    "gelu": gelu_dropout,
    "relu2": relu2_dropout,
}
"""Functions by the name of the activation. A function takes a tensor x and a dropout rate (0 by default), and computes
dropout(activation(x)). It can overwrite x."""
TILE_COLUMNS = 128
"""Largest number of columns in a tile. A tile is the block of numbers that one program of the kernel computes at a
time."""


class ActivatedLinear(nn.Linear):
    """First linear layer of a feed-forward network. It computes dropout(activation(x W' + b)).

    W is the weight matrix, and b is the bias, which the layer always has.
    """

    def __init__(self, num_in: int, num_out: int, *, activation: str) -> None:
        super().__init__(num_in, num_out)
        self.activation = activation

    def forward(self, x_RD: Tensor, drop: Drop) -> Tensor:  # type: ignore[override]
        """Apply the layer, its activation and its dropout to the rows of x. Returns a tensor [R, F].

        `drop` says at which rate dropout is applied, and whether a Triton kernel applies it.
        """
        if not drop.by_kernel:
            return ACTIVATIONS[self.activation](super().forward(x_RD), drop.rate)
        return self._activated(F.linear(x_RD, self.weight), drop)

    def beside_residual(self, x_RD: Tensor, drop: Drop) -> tuple[Tensor, Tensor]:
        """Return (x for the sum of residual and update, result of `forward`). The kernels must apply `drop`.

        The layer's product adds the gradient of x to the gradient of the residual, so no kernel adds them.
        """
        x_RD, product_RF = _ResidualProduct.apply(x_RD, self.weight)  # type: ignore[no-untyped-call]
        return x_RD, self._activated(product_RF, drop)

    def _activated(self, product_RF: Tensor, drop: Drop) -> Tensor:
        """Add the bias to a product, and apply the activation and the dropout by the kernel."""
        result: Tensor = _Activation.apply(  # type: ignore[no-untyped-call]
            product_RF, self.bias, drop.seed, attention_launch.threshold_of(drop.rate), self.activation
        )
        return result


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    """Compute the gated activation x silu(gate) of Shazeer 2020, element by element."""
    return x * F.silu(gate)


class _ResidualProduct(torch.autograd.Function):
    """Autograd function with results (x, x W'). It is for an x that is also the residual of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x.view_as(x), F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_residual, d_product = gradients
        # The gradient of the update can be the same tensor as that of the residual. But the update was made from the
        # product, so its backward pass is over, and nothing else reads the tensor.
        torch.addmm(d_residual, d_product, weight, out=d_residual)
        return d_residual, d_product.t() @ x


class _Activation(torch.autograd.Function):
    """Autograd function for the bias, activation and dropout of `ActivatedLinear`, computed by the kernels.

    For relu the result is kept for the backward pass. For other activations the product x W', the bias b and the seed
    of the dropout are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, bias: Tensor, seed: Tensor | None, threshold: int, activation: str
    ) -> Tensor:
        result = torch.empty_like(product)
        row_tiles, column_tiles, constants = _tiles(product, activation)
        arguments = (product, bias, seed, result, len(product), threshold)
        rows.start("activate", (row_tiles, column_tiles), *arguments, **constants)
        if activation == "relu":
            ctx.save_for_backward(result, None, None, None)
        else:
            ctx.save_for_backward(None, product, bias, seed)
        ctx.settings = (threshold, activation, bias.dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, product, bias, seed = ctx.saved_tensors
        threshold, activation, dtype = ctx.settings
        d_result = gradients[0].contiguous()
        row_tiles, column_tiles, constants = _tiles(d_result, activation)
        # Twice MAX_PARTS, because these programs need half as many registers as those that hold whole rows.
        most_parts = math.ceil(2 * rows.MAX_PARTS / column_tiles)
        num_parts = min(row_tiles, most_parts)
        d_product = torch.empty_like(d_result)
        parts = d_result.new_empty(num_parts, d_result.shape[1], dtype=torch.float32)
        arguments = (d_result, result, product, bias, seed, d_product, parts, len(d_result), threshold)
        rows.start("activation_gradients", (num_parts, column_tiles), *arguments, **constants)
        d_bias = rows.summed(parts, dtype=dtype)
        return d_product, d_bias, None, None, None


def _tiles(x_RF: Tensor, activation: str) -> tuple[int, int, dict[str, Any]]:
    """Return (number of tiles of rows, number of tiles of columns, compile-time arguments of the kernels)."""
    num_rows, width = x_RF.shape
    next_power_of_2 = 1 << (width - 1).bit_length()
    columns = min(TILE_COLUMNS, max(16, next_power_of_2))
    tile_rows = rows.TILE_LEN // columns
    constants = {"ACTIVATION": activation, "F": width, "ROWS": tile_rows, "COLUMNS": columns}
    return math.ceil(num_rows / tile_rows), math.ceil(width / columns), constants
