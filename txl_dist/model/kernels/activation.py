"""bias + activation + dropout in one kernel, and its backward; `model/activation.py` runs them, and has their twin.

The backward of relu asks the result alone: where it is 0, so is the gradient, whether the number was negative or
dropped. Other activations keep the product that they were given, and make again what dropout keeps of the seed. Each
program of the backward makes a part of the bias' gradient; `residual_norm.sum_all` adds the parts up.

No atomics, so the result is always the same. What lies between reading and writing is in fp32.

Shapes: R rows, F their width. All tensors are contiguous RF, but the bias [F].
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

from txl_dist.model.kernels.relative_attention import kept

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
"""Of the normal distribution: 1 / sqrt(2 pi)."""
NOT_SPECIAL = ["num_rows", "threshold"]


@triton.jit
def tile_of(row_tile, column_tile, num_rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, offsets, mask); the latter [ROWS, COLUMNS]."""
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < F)[None, :]
    return row, row.to(tl.int64)[:, None] * F + column[None, :], mask


@triton.jit
def load_bias(BIAS, column_tile, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] in fp32, the same in all rows: a single row would be loaded in numbers of two bytes."""
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    pointer = tl.broadcast_to((BIAS + column)[None, :], [ROWS, COLUMNS])
    return tl.load(pointer, mask=tl.broadcast_to((column < F)[None, :], [ROWS, COLUMNS]), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def activate(PRODUCT, BIAS, SEED, RESULT, num_rows, threshold,
             ACTIVATION: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """result = dropout(activation(product + bias)). Programs: (tiles of rows, tiles of columns)."""
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
        x = tl.where(keep, x * (65536.0 / (65536 - threshold)), 0.0)
    tl.store(RESULT + place, x.to(RESULT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def activation_gradients(D_RESULT, RESULT, PRODUCT, BIAS, SEED, D_PRODUCT, PARTS, num_rows, threshold,
                         ACTIVATION: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr):  # fmt: skip
    """Of the product, and [parts, F] parts of the bias': for relu by RESULT, else by PRODUCT, BIAS and SEED.
    Programs: (parts, tiles of columns); a part has every so-many-th tile of rows."""
    factor = 65536.0 / (65536 - threshold)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row, place, mask = tile_of(tile, tl.program_id(1), num_rows, F, ROWS, COLUMNS)
        gradient = tl.load(D_RESULT + place, mask=mask, other=0.0).to(tl.float32) * factor
        if ACTIVATION == "relu":
            gradient = tl.where(tl.load(RESULT + place, mask=mask, other=0.0) > 0, gradient, 0.0)
        else:
            x = tl.load(PRODUCT + place, mask=mask, other=0.0).to(tl.float32)
            x += load_bias(BIAS, tl.program_id(1), F, ROWS, COLUMNS)
            if ACTIVATION == "gelu":
                slope = 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * DENSITY_AT_0 * tl.exp(-0.5 * x * x)
            else:
                slope = 2.0 * tl.maximum(x, 0.0)
            gradient = gradient * slope
            if SEED is not None:
                keep = kept(tl.load(SEED), 0, 0, row, tl.program_id(1) * COLUMNS, threshold, COLUMNS)
                gradient = tl.where(keep, gradient, 0.0)
        tl.store(D_PRODUCT + place, gradient.to(D_PRODUCT.dtype.element_ty), mask=mask)
        total += gradient
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(PARTS + tl.program_id(0) * F + column, tl.sum(total, 0), mask=column < F)
