"""Triton kernels of bias + activation + dropout, forward and backward. `model/activation.py` starts them.

`model/activation.py` also has the same computation in torch. The backward pass of relu needs only the result. Where the
result is 0, the gradient is 0, because the number was negative or dropped. Other activations keep the matrix product,
and compute the dropout mask again from the seed. Each program of the backward pass computes a part of the bias's
gradient. `residual_norm.sum_all` adds the parts.

There are no atomics, so the result is always the same. Intermediate values are in fp32.

Shapes: R rows (one per token), F width of a row. The bias is [F], and all other tensors are contiguous RF.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

from txl_dist.model.kernels.relative_attention import kept

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
"""Density of the normal distribution at 0: 1 / sqrt(2 pi)."""
NOT_SPECIAL = ["num_rows", "threshold"]
"""Kernel arguments for which Triton compiles only one version of the kernel, whatever their values."""


@triton.jit
def tile_of(row_tile, column_tile, num_rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (row numbers, offsets in memory, mask) of a program's tile. Offsets and mask are [ROWS, COLUMNS]."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < F)[None, :]
    place = row.to(tl.int64)[:, None] * F + column[None, :]
    return row, place, mask


@triton.jit
def load_bias(BIAS, column_tile, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile of the bias as [ROWS, COLUMNS] in fp32. All rows of the result are equal.

    If only one row were loaded, each load would move only two bytes.
    """
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    pointer = tl.broadcast_to((BIAS + column)[None, :], [ROWS, COLUMNS])
    mask = tl.broadcast_to((column < F)[None, :], [ROWS, COLUMNS])
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def activate(
    PRODUCT,
    BIAS,
    SEED,
    RESULT,
    num_rows,
    threshold,
    ACTIVATION: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute dropout(activation(product + bias)). The grid of programs is (tiles of rows, tiles of columns)."""
    row, place, mask = tile_of(tl.program_id(0), tl.program_id(1), num_rows, F, ROWS, COLUMNS)
    x = tl.load(PRODUCT + place, mask=mask, other=0.0).to(tl.float32)
    x += load_bias(BIAS, tl.program_id(1), F, ROWS, COLUMNS)
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        x = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            x = x * x
    if SEED is not None:
        keep = kept(tl.load(SEED), 0, 0, row, tl.program_id(1) * COLUMNS, threshold, COLUMNS)
        scale = 65536.0 / (65536 - threshold)
        x = tl.where(keep, x * scale, 0.0)
    tl.store(RESULT + place, x.to(RESULT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def activation_gradients(
    D_RESULT,
    RESULT,
    PRODUCT,
    BIAS,
    SEED,
    D_PRODUCT,
    PARTS,
    num_rows,
    threshold,
    ACTIVATION: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of the product, and partial sums [parts, F] of the bias's gradient.

    The activation relu needs RESULT. Other activations need PRODUCT, BIAS and SEED. Part p of P covers the tiles of
    rows p, p + P, p + 2 P ... The grid of programs is (parts, tiles of columns).
    """
    factor = 65536.0 / (65536 - threshold)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row, place, mask = tile_of(tile, tl.program_id(1), num_rows, F, ROWS, COLUMNS)
        gradient = tl.load(D_RESULT + place, mask=mask, other=0.0).to(tl.float32) * factor
        if ACTIVATION == "relu":
            result = tl.load(RESULT + place, mask=mask, other=0.0)
            gradient = tl.where(result > 0, gradient, 0.0)
        else:
            x = tl.load(PRODUCT + place, mask=mask, other=0.0).to(tl.float32)
            x += load_bias(BIAS, tl.program_id(1), F, ROWS, COLUMNS)
            if ACTIVATION == "gelu":
                cumulative = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
                slope = cumulative + x * DENSITY_AT_0 * tl.exp(-0.5 * x * x)
            else:
                slope = 2.0 * tl.maximum(x, 0.0)
            gradient = gradient * slope
            if SEED is not None:
                keep = kept(tl.load(SEED), 0, 0, row, tl.program_id(1) * COLUMNS, threshold, COLUMNS)
                gradient = tl.where(keep, gradient, 0.0)
        tl.store(D_PRODUCT + place, gradient.to(D_PRODUCT.dtype.element_ty), mask=mask)
        total += gradient
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = PARTS + tl.program_id(0) * F + column
    tl.store(part, tl.sum(total, 0), mask=column < F)
