"""A Triton kernel that makes Adam's step for several tensors. `train/engine/adam_update.py` starts it.

It reads gradients in their own type and writes the weights in the model's type. Separate operations would first copy
the gradients in fp32, then make the step, and then copy the weights. That is 46 bytes per value in half precision, the
norm of the gradients included. The kernel moves 28, and the norm reads 2.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam_step(
    WEIGHTS,
    MASTERS,
    MEANS,
    SQUARES,
    GRADIENTS,
    sizes,
    divisor,
    decay,
    mean_share,
    square_kept,
    square_share,
    rate,
    root,
    eps,
    IS_DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make Adam's step. The first six arguments are tuples with an item per tensor. `sizes` are numbers of values.

    MASTERS are the weights in fp32, and WEIGHTS are their copies in the model's type. MEANS and SQUARES are the
    averages of the gradients and of their squares. Gradients are divided by `divisor` first. `decay` is the weight
    decay, times the learning rate if it is decoupled. `rate` is the learning rate divided by the correction of the
    mean, and `root` is the square root of the correction of the squares. Each program computes BLOCK values of one
    tensor. The programs of the first tensor come first.
    """
    tile = tl.program_id(0)
    for i in tl.static_range(len(WEIGHTS)):
        num_tiles = tl.cdiv(sizes[i], BLOCK)
        if (tile >= 0) & (tile < num_tiles):
            place = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = place < sizes[i]
            gradient = tl.load(GRADIENTS[i] + place, mask=mask, other=0.0).to(tl.float32) / divisor
            master = tl.load(MASTERS[i] + place, mask=mask, other=0.0)
            mean = tl.load(MEANS[i] + place, mask=mask, other=0.0)
            square = tl.load(SQUARES[i] + place, mask=mask, other=0.0)
            if IS_DECOUPLED:
                master -= decay * master
            else:
                gradient += decay * master
            mean += mean_share * (gradient - mean)
            square = square_kept * square + square_share * gradient * gradient
            master -= rate * mean / (tl.sqrt(square) / root + eps)
            tl.store(MASTERS[i] + place, master, mask=mask)
            tl.store(MEANS[i] + place, mean, mask=mask)
            tl.store(SQUARES[i] + place, square, mask=mask)
            tl.store(WEIGHTS[i] + place, master.to(WEIGHTS[i].dtype.element_ty), mask=mask)
        tile -= num_tiles
