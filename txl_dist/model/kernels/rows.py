"""Launch of the kernels that work on rows of a block, `residual_norm` and `activation`.

They run where the attention kernels do, by the same setting. Their dropout is seeded like attention's: by tensors drawn
from the device's default generator. So nothing waits, and activation checkpointing draws the same masks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from txl_dist.config.schema import AttentionKernel
from txl_dist.model.kernels.attention_launch import KEEP_LEVELS, NUM_MULTIPROCESSORS, unsupported_device_reason

MAX_WIDTH = 8192
"""Longest row that a program can hold: sixteen numbers per thread, with the largest number of warps."""
TILE_LEN = 2048
"""Numbers that a program of four warps holds at a time."""
MAX_PARTS = 4 * NUM_MULTIPROCESSORS
"""Largest number of programs that each compute a partial sum over rows of a gradient."""
SUM_ROWS = 64
"""Rows of a tile of partial sums."""
SUM_COLUMNS = 32
"""Columns of a tile of partial sums."""


def runs(setting: AttentionKernel, x: Tensor) -> bool:
    """Whether the kernels run for rows like `x`, by the setting `engine.attention`."""
    return fits(setting, x) and unsupported_device_reason(x) is None


def fits(setting: AttentionKernel, x: Tensor) -> bool:
    """Whether the kernels run for rows like `x` on a device that supports them."""
    if setting not in ("auto", "triton"):
        return False
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and x.shape[-1] <= MAX_WIDTH


def draw_seeds(count: int, *, like: Tensor) -> tuple[Tensor, ...]:
    """Draw `count` seeds of dropout, [1] int64 each, in one launch."""
    seeds = torch.randint(2**63 - 1, (count, 1), device=like.device)
    return seeds.unbind(0)


def threshold_of(rate: float) -> int:
    """Return how many of `KEEP_LEVELS` numbers dropout sets to 0: never all."""
    threshold = round(rate * KEEP_LEVELS)
    return min(threshold, KEEP_LEVELS - 1)


def start(name: str, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch the kernel of this name, of `kernels.activation` or `kernels.residual_norm`, on `grid` programs."""
    from txl_dist.model.kernels import activation, residual_norm

    module = residual_norm if hasattr(residual_norm, name) else activation
    kernel: Any = getattr(module, name)
    launch = kernel[grid]
    launch(*arguments, **constants, num_warps=num_warps)


def summed(parts: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension and return the sum in type `dtype`."""
    num_parts = len(parts)
    length = parts[0].numel()
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    num_tiles = math.ceil(length / SUM_COLUMNS)
    start("sum_all", (num_tiles,), parts, total, num_parts, length, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return total
