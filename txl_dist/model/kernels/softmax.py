"""A Triton kernel that turns a chunk's logits into losses and gradients in place, and one that scales gradients.

`fused_softmax` starts both. It also has the same computation in torch. The first kernel reads each row twice. The
first pass computes the row's maximum and sum of exponentials, online. The second pass writes the gradient over the
logits while the cache still holds the row. This moves six bytes per logit in half precision. Separate operations would
pass over the whole chunk 24 times.

A logit is overwritten only after its whole row has been read. No program reads memory that another program writes. Sums
are in fp32, and always in the same order.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum. It is below all logits, but finite."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["TARGETS", "SHARE"])
def logits_to_gradient(
    LOGITS,
    BIAS,
    TARGETS,
    SHARE,
    LOSS,
    num_rows,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Replace logits by share * (softmax(logits + bias) - one-hot target), and write each row's loss.

    Each program processes a tile of rows. Rows are `stride` numbers apart, a multiple of 16. BIAS has `stride` numbers
    in fp32. They are -inf after the last column, so the padding of a row has no weight and its gradient is 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < num_rows
    base = LOGITS + row.to(tl.int64)[:, None] * stride
    target = tl.load(TARGETS + row, mask=known, other=0).to(tl.int32)
    share = tl.load(SHARE + row, mask=known, other=0.0)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    target_logit = tl.zeros([ROWS], tl.float32)
    for first in range(0, stride, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < stride
        bias = tl.load(BIAS + column, mask=is_column, other=float("-inf"))
        mask = known[:, None] & is_column[None, :]
        product = tl.load(base + column[None, :], mask=mask, other=0.0)
        logit = product.to(tl.float32) + bias[None, :]
        tile_highest = tl.max(logit, 1)
        higher = tl.maximum(highest, tile_highest)
        shrink = tl.exp2((highest - higher) * LOG2_E)
        shrunk_total = total * shrink
        exponential = tl.exp2((logit - higher[:, None]) * LOG2_E)
        total = shrunk_total + tl.sum(exponential, 1)
        is_target = column[None, :] == target[:, None]
        only_target = tl.where(is_target, logit, 0.0)
        target_logit += tl.sum(only_target, 1)
        highest = higher
    loss_pointer = LOSS + row
    loss = tl.log(total) + highest - target_logit
    tl.store(loss_pointer, loss, mask=known)

    factor = share / total
    for first in range(0, stride, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < stride
        bias = tl.load(BIAS + column, mask=is_column, other=float("-inf"))
        mask = known[:, None] & is_column[None, :]
        pointer = base + column[None, :]
        product = tl.load(pointer, mask=mask, other=0.0)
        logit = product.to(tl.float32) + bias[None, :]
        exponential = tl.exp2((logit - highest[:, None]) * LOG2_E)
        gradient = exponential * factor[:, None]
        is_target = column[None, :] == target[:, None]
        gradient -= tl.where(is_target, share[:, None], 0.0)
        tl.store(pointer, gradient.to(LOGITS.dtype.element_ty), mask=mask)


@triton.jit
def multiply_unless_one(VALUES, FACTOR, size, BLOCK: tl.constexpr):
    """Multiply values in place by one number in memory. If that number is 1, no value is read or written.

    The host would have to wait for the device to know that number. Each program multiplies BLOCK of the `size` values.
    """
    factor = tl.load(FACTOR)
    if factor != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = place < size
        values = tl.load(VALUES + place, mask=mask, other=0.0)
        product = values.to(tl.float32) * factor
        tl.store(VALUES + place, product.to(VALUES.dtype.element_ty), mask=mask)
