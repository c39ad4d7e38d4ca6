"""Triton kernels for dropout + residual sum + norm, forward and backward. `model/residual_norm.py` starts them.

`model/residual_norm.py` also has the same computation in torch. A program holds its rows in registers. It computes the
sum, writes it once, and norms it without reading it again. The backward pass needs the sum, and the mean and the scale
of each row. It computes the dropout mask again from the seed. Each program of the backward pass computes a part of the
gradient of a layer norm's gains and biases. `sum_all` adds the parts.

There are no atomics, so the result is always the same. Statistics are in fp32. They are computed from the rounded sum,
because the backward pass and the next layer see only the rounded sum.

Rows can be padded by columns of zeros. COUNT is their number of columns without padding, by which sums are divided. A
mean is not subtracted from the padding, so the padding of all results is 0.

Shapes: R rows (one per token), D width of a row. MEAN and SCALE are [R] in fp32, and all other tensors are contiguous
RD. Without WEIGHT the norm is a division by the root mean square. Without NORMED (D_NORMED) there is no norm.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

from txl_dist.model.kernels.relative_attention import kept, sum_rows

NOT_SPECIAL = ["num_rows", "threshold"]
"""Kernel arguments for which Triton compiles only one version of the kernel, whatever their values."""


@triton.jit
def places(row, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (offsets in memory, mask) of the numbers in these rows. Each result is [rows, BLOCK_D]."""
    column = tl.arange(0, BLOCK_D)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    mask = (row < num_rows)[:, None] & (column < D)[None, :]
    return place, mask


@triton.jit
def without_padding(mask, COUNT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask without the padding at the end of the rows."""
    return mask & (tl.arange(0, BLOCK_D) < COUNT)[None, :]


@triton.jit
def gains(POINTER, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load gains or biases as [ROWS, BLOCK_D] in fp32. All rows of the result are equal.

    If only one row were loaded, each load would move only two bytes.
    """
    column = tl.arange(0, BLOCK_D)
    pointer = tl.broadcast_to((POINTER + column)[None, :], [ROWS, BLOCK_D])
    mask = tl.broadcast_to((column < D)[None, :], [ROWS, BLOCK_D])
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dropped(value, SEED, row, threshold, BLOCK_D: tl.constexpr):
    """Apply dropout to these rows. Kept numbers are scaled up, and the other numbers become 0."""
    keep = kept(tl.load(SEED), 0, 0, row, 0, threshold, BLOCK_D)
    scale = 65536.0 / (65536 - threshold)
    return tl.where(keep, value * scale, 0.0)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def residual_norm(
    RESIDUAL,
    UPDATE,
    WEIGHT,
    BIAS,
    SEED,
    SUM,
    NORMED,
    MEAN,
    SCALE,
    num_rows,
    threshold,
    eps,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the sum residual + dropout(update), and the norm of the sum. Each program computes a tile of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place, mask = places(row, num_rows, D, BLOCK_D)
    update = tl.load(UPDATE + place, mask=mask, other=0.0).to(tl.float32)
    if SEED is not None:
        update = dropped(update, SEED, row, threshold, BLOCK_D)
    residual = tl.load(RESIDUAL + place, mask=mask, other=0.0).to(tl.float32)
    total = (residual + update).to(SUM.dtype.element_ty)
    tl.store(SUM + place, total, mask=mask)
    if NORMED is not None:
        unit = total.to(tl.float32)
        if WEIGHT is not None:
            mean = tl.sum(unit, 1) / COUNT
            tl.store(MEAN + row, mean, mask=row < num_rows)
            unit = tl.where(without_padding(mask, COUNT, BLOCK_D), unit - mean[:, None], 0.0)
        mean_square = tl.sum(unit * unit, 1) / COUNT
        scale = tl.rsqrt(mean_square + eps)
        tl.store(SCALE + row, scale, mask=row < num_rows)
        unit = unit * scale[:, None]
        if WEIGHT is not None:
            unit = unit * gains(WEIGHT, D, ROWS, BLOCK_D) + gains(BIAS, D, ROWS, BLOCK_D)
        tl.store(NORMED + place, unit.to(NORMED.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIAL, do_not_specialize_on_alignment=["SEED"])
def residual_norm_gradients(
    D_SUM,
    D_NORMED,
    SUM,
    MEAN,
    SCALE,
    WEIGHT,
    SEED,
    D_RESIDUAL,
    D_UPDATE,
    PARTS,
    num_rows,
    threshold,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the gradients of the residual and of the update. Without dropout these two gradients are the same tensor.

    Also compute partial sums [programs, 2, D] of the gradients of WEIGHT and BIAS. Program p of P covers the tiles of
    rows p, p + P, p + 2 P ...
    """
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
                centred = tl.where(without_padding(mask, COUNT, BLOCK_D), unit - mean[:, None], 0.0)
                unit = centred * scale[:, None]
                d_weight += d_unit * unit
                d_bias += d_unit
                d_unit = d_unit * gains(WEIGHT, D, ROWS, BLOCK_D)
                d_mean = tl.sum(d_unit, 1) / COUNT
                d_total -= tl.where(without_padding(mask, COUNT, BLOCK_D), d_mean[:, None], 0.0)
            else:
                unit = unit * scale[:, None]
            along_unit = tl.sum(d_unit * unit, 1) / COUNT
            d_total += d_unit - unit * along_unit[:, None]
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
    """Sum `num_parts` rows of `length` numbers. Each program sums a tile of columns."""
    sum_rows(PARTS, TOTAL, tl.program_id(0), num_parts, length, ROWS, COLUMNS)
