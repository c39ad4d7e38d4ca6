"""Launch of the kernels that work on rows of hidden states, `residual_norm` and `activation`.

They run where the attention kernels run, and the same setting (`engine.attention`) chooses them. The seeds of their
dropout are tensors that are drawn from the device's default generator. So the host does not wait for the device, and
activation checkpointing draws the same masks again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from txl_dist.config.schema import AttentionKernel
from txl_dist.model.kernels.attention_launch import (
    NUM_MULTIPROCESSORS,
    launching_on,
    unsupported_device_reason,
)

MAX_WIDTH = 8192
"""Largest width of a row that one program can hold. It is 16 numbers per thread, with the largest number of warps."""
TILE_LEN = 2048
"""Largest number of values that a program of four warps holds at a time."""
MAX_PARTS = 4 * NUM_MULTIPROCESSORS
"""Largest number of programs that compute partial sums of a gradient over rows."""
SUM_ROWS = 64
"""Number of rows in a tile of partial sums, for the kernel `sum_all`."""
SUM_COLUMNS = 32
"""Number of columns in a tile of partial sums, for the kernel `sum_all`."""


def runs(setting: AttentionKernel, x: Tensor) -> bool:
    """Return True if the kernels run for rows with the type, the width and the device of `x`. `setting` is
    `engine.attention`."""
    return fits(setting, x) and unsupported_device_reason(x) is None


def fits(setting: AttentionKernel, x: Tensor) -> bool:
    """Return True if the kernels support the type and the width of the rows `x`. The device of `x` is not checked."""
    if setting not in ("auto", "triton"):
        return False
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and x.shape[-1] <= MAX_WIDTH


def draw_seeds(count: int, *, like: Tensor) -> tuple[Tensor, ...]:
    """Draw `count` seeds of dropout in one launch. Returns int64 tensors [1]."""
    seeds = torch.randint(2**63 - 1, (count, 1), device=like.device)
    return seeds.unbind(0)


def start(name: str, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel on `grid` programs.

    The function `name` of `kernels.activation` or `kernels.residual_norm` is the kernel. `constants` are compile-time
    arguments of the kernel.
    """
    from txl_dist.model.kernels import activation, residual_norm

    module = residual_norm if hasattr(residual_norm, name) else activation
    kernel: Any = getattr(module, name)
    launch = kernel[grid]
    first = next(x for x in arguments if isinstance(x, Tensor))
    with launching_on(first):
        launch(*arguments, **constants, num_warps=num_warps)


def summed(parts: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension and return the sum in type `dtype`."""
    num_parts = len(parts)
    length = parts[0].numel()
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    num_tiles = math.ceil(length / SUM_COLUMNS)
    start("sum_all", (num_tiles,), parts, total, num_parts, length, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return total
