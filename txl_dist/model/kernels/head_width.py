"""Heads of another width: zeros are added behind each head, or what stands there is left out. `launch` runs it.

The kernels of attention want heads whose rows begin at multiples of 16 bytes. A fill and a copy per tensor, forward and
backward, would be half of a layer's launches where heads are not so wide.
"""
# mypy: ignore-errors
# (Triton's language looks like Python, but its types are not.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_width(FROM, TO, num_rows, strides, num_heads, H: tl.constexpr, H_TO: tl.constexpr,
              ROWS: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Several tensors at once, tuples of equal lengths: [positions, heads, H], `strides` apart, to [..., H_TO], which
    are contiguous. `num_rows` are positions times heads. Programs: tiles of rows, of one tensor behind the other."""
    tile = tl.program_id(0)
    for i in tl.static_range(len(FROM)):
        num_tiles = tl.cdiv(num_rows[i], ROWS)
        if (tile >= 0) & (tile < num_tiles):
            copy_rows(FROM[i], TO[i], tile, num_rows[i], strides[i], num_heads, H, H_TO, ROWS, BLOCK_H)
        tile -= num_tiles


@triton.jit
def copy_rows(FROM, TO, tile, num_rows, stride, num_heads, H: tl.constexpr, H_TO: tl.constexpr,
              ROWS: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Some rows of one tensor."""
    row, h = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_H)
    known = (row < num_rows)[:, None]
    place = (row // num_heads).to(tl.int64)[:, None] * stride + (row % num_heads)[:, None] * H + h[None, :]
    value = tl.load(FROM + place, mask=known & (h < H)[None, :], other=0.0)
    tl.store(TO + row.to(tl.int64)[:, None] * H_TO + h[None, :], value, mask=known & (h < H_TO)[None, :])
