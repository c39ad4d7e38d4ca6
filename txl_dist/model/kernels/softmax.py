"""A chunk's logits to loss and gradient in place, by one kernel; `fused_softmax` runs it, and has its twin in torch.

Each row is passed over twice: once for its maximum and the sum of exponentials, made online, and once to write the
gradient where the logits were, while the cache still holds the row. That is six bytes per logit in half precision, of
24 times that many operations over the whole chunk otherwise.

No logit is written before all of its row were read, and nothing is read that another program writes. Sums are in fp32,
and always in the same order.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Where the running maximum begins: below all logits, but finite."""


@triton.jit(do_not_specialize=["num_rows"])
def logits_to_gradient(LOGITS, BIAS, TARGETS, SHARE, LOSS, num_rows, stride,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """share * (softmax(logits + bias) - one-hot target) over the logits, and each row's loss. Programs: tiles of rows.

    Rows are `stride` apart, which is a multiple of 16. BIAS has as many numbers, in fp32: behind the last column they
    are -inf, so that what stands there counts for nothing and becomes 0.
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
        bias = tl.load(BIAS + column, mask=column < stride, other=float("-inf"))
        mask = known[:, None] & (column < stride)[None, :]
        logit = tl.load(base + column[None, :], mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        higher = tl.maximum(highest, tl.max(logit, 1))
        total = total * tl.exp2((highest - higher) * LOG2_E) + tl.sum(tl.exp2((logit - higher[:, None]) * LOG2_E), 1)
        target_logit += tl.sum(tl.where(column[None, :] == target[:, None], logit, 0.0), 1)
        highest = higher
    tl.store(LOSS + row, tl.log(total) + highest - target_logit, mask=known)

    factor = share / total
    for first in range(0, stride, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        bias = tl.load(BIAS + column, mask=column < stride, other=float("-inf"))
        mask = known[:, None] & (column < stride)[None, :]
        logit = tl.load(base + column[None, :], mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        gradient = tl.exp2((logit - highest[:, None]) * LOG2_E) * factor[:, None]
        gradient -= tl.where(column[None, :] == target[:, None], share[:, None], 0.0)
        tl.store(base + column[None, :], gradient.to(LOGITS.dtype.element_ty), mask=mask)
