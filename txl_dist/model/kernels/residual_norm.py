"""dropout + residual sum + norm in one kernel, and its backward; `model/residual_norm.py` runs them, and has the twin.

Each row is in the registers of one program: the sum is read, made and written once, and normed from there. Between
forward and backward the sum is kept, and mean and scale of each row; what dropout keeps is made again of the seed. Of
the gains and biases of a layer norm each program of the backward makes a part of the gradient, and `sum_all` the sum.

No atomics, so the result is always the same. Sums are in fp32, of the sum as it was rounded: that is what the backward
sees, and what the next layer is given.

Shapes: R rows, D their width. All tensors are contiguous RD, but MEAN and SCALE, which are [R] in fp32. Without WEIGHT
the norm is a division by the root mean square; without NORMED (D_NORMED) there is none.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

from txl_dist.model.kernels.relative_attention import kept, sum_rows

NOT_SPECIAL = ["num_rows", "threshold"]


@triton.jit
def places(row, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(offsets, mask), [rows, BLOCK_D]."""
    column = tl.arange(0, BLOCK_D)
    return row.to(tl.int64)[:, None] * D + column[None, :], (row < num_rows)[:, None] & (column < D)[None, :]


@triton.jit
def gains(POINTER, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS, BLOCK_D] in fp32, the same in all rows: a single row would be loaded in numbers of two bytes."""
    column = tl.arange(0, BLOCK_D)
    pointer = tl.broadcast_to((POINTER + column)[None, :], [ROWS, BLOCK_D])
    return tl.load(pointer, mask=tl.broadcast_to((column < D)[None, :], [ROWS, BLOCK_D]), other=0.0).to(tl.float32)


@triton.jit
def dropped(value, SEED, row, threshold, BLOCK_D: tl.constexpr):
    """The numbers of these rows that dropout keeps, scaled up, else 0."""
    keep = kept(tl.load(SEED), 0, 0, row, 0, threshold, BLOCK_D)
    return tl.where(keep, value * (65536.0 / (65536 - threshold)), 0.0)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def residual_norm(RESIDUAL, UPDATE, WEIGHT, BIAS, SEED, SUM, NORMED, MEAN, SCALE, num_rows, threshold, eps,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """sum = residual + dropout(update), and its norm. Programs: tiles of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place, mask = places(row, num_rows, D, BLOCK_D)
    update = tl.load(UPDATE + place, mask=mask, other=0.0).to(tl.float32)
    if SEED is not None:
        update = dropped(update, SEED, row, threshold, BLOCK_D)
    total = (tl.load(RESIDUAL + place, mask=mask, other=0.0).to(tl.float32) + update).to(SUM.dtype.element_ty)
    tl.store(SUM + place, total, mask=mask)
    if NORMED is not None:
        unit = total.to(tl.float32)
        if WEIGHT is not None:
            mean = tl.sum(unit, 1) / D
            tl.store(MEAN + row, mean, mask=row < num_rows)
            unit = tl.where(mask, unit - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(unit * unit, 1) / D + eps)
        tl.store(SCALE + row, scale, mask=row < num_rows)
        unit = unit * scale[:, None]
        if WEIGHT is not None:
            unit = unit * gains(WEIGHT, D, ROWS, BLOCK_D) + gains(BIAS, D, ROWS, BLOCK_D)
        tl.store(NORMED + place, unit.to(NORMED.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def residual_norm_gradients(D_SUM, D_NORMED, SUM, MEAN, SCALE, WEIGHT, SEED, D_RESIDUAL, D_UPDATE, PARTS,
                            num_rows, threshold,
                            D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Of the residual, of the update unless it is the same, and [programs, 2, D] parts of those of WEIGHT and BIAS.
    Programs: each has every so-many-th tile of rows."""
    d_weight = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        place, mask = places(row, num_rows, D, BLOCK_D)
        d_total = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if D_NORMED is not None:
            d_unit = tl.load(D_NORMED + place, mask=mask, other=0.0).to(tl.float32)
            unit = tl.load(SUM + place, mask=mask, other=0.0).to(tl.float32)
            scale = tl.load(SCALE + row, mask=row < num_rows, other=0.0)
            if WEIGHT is not None:
                mean = tl.load(MEAN + row, mask=row < num_rows, other=0.0)
                unit = tl.where(mask, unit - mean[:, None], 0.0) * scale[:, None]
                d_weight += d_unit * unit
                d_bias += d_unit
                d_unit = d_unit * gains(WEIGHT, D, ROWS, BLOCK_D)
                d_total -= (tl.sum(d_unit, 1) / D)[:, None]
            else:
                unit = unit * scale[:, None]
            d_total += d_unit - unit * (tl.sum(d_unit * unit, 1) / D)[:, None]
            d_total = d_total * scale[:, None]
        if D_SUM is not None:
            d_total += tl.load(D_SUM + place, mask=mask, other=0.0).to(tl.float32)
        if D_RESIDUAL is not None:
            tl.store(D_RESIDUAL + place, d_total.to(D_RESIDUAL.dtype.element_ty), mask=mask)
        if SEED is not None:
            d_update = dropped(d_total, SEED, row, threshold, BLOCK_D)
            tl.store(D_UPDATE + place, d_update.to(D_UPDATE.dtype.element_ty), mask=mask)
    if PARTS is not None:
        column = tl.arange(0, BLOCK_D)
        part = PARTS + tl.program_id(0) * 2 * D + column
        tl.store(part, tl.sum(d_weight, 0), mask=column < D)
        tl.store(part + D, tl.sum(d_bias, 0), mask=column < D)


@triton.jit(do_not_specialize=["num_parts"])
def sum_all(PARTS, TOTAL, num_parts, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of rows that are `length` long. Programs: tiles of columns."""
    sum_rows(PARTS, TOTAL, tl.program_id(0), num_parts, length, ROWS, COLUMNS)
