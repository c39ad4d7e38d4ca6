"""A Triton kernel that changes the width of heads: it pads or cuts each head. `attention_launch` starts it.

The attention kernels need heads whose rows begin at multiples of 16 bytes. With torch, padding takes a fill and a copy
per tensor, in the forward and in the backward pass. These fills and copies would be half of a layer's launches.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_width(
    FROM,
    TO,
    num_rows,
    strides,
    num_heads,
    H: tl.constexpr,
    H_TO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Copy several tensors [positions, heads, H] to contiguous tensors [positions, heads, H_TO].

    The first four arguments are tuples with an item per tensor. `num_rows` are positions times heads. `strides` are the
    distances between positions. Each program copies one tile of rows. The tiles of the first tensor come first.
    """
    tile = tl.program_id(0)
    for i in tl.static_range(len(FROM)):
        num_tiles = tl.cdiv(num_rows[i], ROWS)
        if (tile >= 0) & (tile < num_tiles):
            copy_rows(FROM[i], TO[i], tile, num_rows[i], strides[i], num_heads, H, H_TO, ROWS, BLOCK_H)
        tile -= num_tiles


@triton.jit
def copy_rows(
    FROM,
    TO,
    tile,
    num_rows,
    stride,
    num_heads,
    H: tl.constexpr,
    H_TO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Copy one tile of rows of one tensor."""
    row = tile * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK_H)
    known = (row < num_rows)[:, None]
    position_start = (row // num_heads).to(tl.int64)[:, None] * stride
    head_start = (row % num_heads)[:, None] * H
    place = position_start + head_start + h[None, :]
    value = tl.load(FROM + place, mask=known & (h < H)[None, :], other=0.0)
    mask = known & (h < H_TO)[None, :]
    pointer = TO + row.to(tl.int64)[:, None] * H_TO + h[None, :]
    tl.store(pointer, value, mask=mask)
