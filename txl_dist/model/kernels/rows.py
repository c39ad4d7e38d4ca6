"""What the kernels share that work on rows of a block, `residual_norm` and `activation`: when, and how, they are run.

They run where those of attention do, by the same setting. Their dropout is seeded like attention's, too: by tensors,
drawn from the device's default generator, so that nothing waits, and activation checkpointing makes the same masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from txl_dist.config.schema import AttentionKernel
from txl_dist.model.kernels.launch import KEEP_LEVELS, NUM_MULTIPROCESSORS, unsupported_device_reason

MAX_WIDTH = 8192
"""Numbers in a row that a program holds as a whole: sixteen in each thread, of as many warps as there can be."""
TILE_LEN = 2048
"""Numbers that a program of four warps holds at a time."""
MAX_PARTS = 4 * NUM_MULTIPROCESSORS
"""Programs that make a part each of a gradient that is summed over rows."""
SUM_ROWS, SUM_COLUMNS = 64, 32
"""Of a tile of parts."""


def runs(setting: AttentionKernel, x: Tensor) -> bool:
    """Whether the kernels run for rows like these, by `engine.attention`."""
    return fits(setting, x) and unsupported_device_reason(x) is None


def fits(setting: AttentionKernel, x: Tensor) -> bool:
    """The same, on a device that they can run on."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return setting in ("auto", "triton") and is_half and x.shape[-1] <= MAX_WIDTH


def draw_seeds(count: int, *, like: Tensor) -> tuple[Tensor, ...]:
    """So many seeds of dropout, [1] int64 each, of one launch."""
    return torch.randint(2**63 - 1, (count, 1), device=like.device).unbind(0)


def threshold_of(rate: float) -> int:
    """How many of `KEEP_LEVELS` numbers dropout sets to 0; not all."""
    return min(round(rate * KEEP_LEVELS), KEEP_LEVELS - 1)


def start(name: str, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel of either file."""
    from txl_dist.model.kernels import activation, residual_norm

    kernel: Any = {**vars(activation), **vars(residual_norm)}[name]
    kernel[grid](*arguments, **constants, num_warps=num_warps)


def summed(parts: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension, in this type."""
    num_parts, length = len(parts), parts[0].numel()
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    start("sum_all", (-(-length // SUM_COLUMNS),), parts, total, num_parts, length, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return total
