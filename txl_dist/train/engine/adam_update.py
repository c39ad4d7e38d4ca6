"""Adam's step by a Triton kernel, at ZeRO stages 1 and 2 on a GPU.

The kernel reads the gradients of a parameter group where they lie, and writes fp32 weights, moments and the model's
weights in one pass. The state has the names of torch's Adam, so checkpoints are the same. Results equal those of
torch's fused Adam to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from txl_dist.config.schema import AttentionKernel
from txl_dist.model.kernels.attention_launch import launching_on, unsupported_device_reason

_BLOCK = 1024
"""Number of values that a program of the kernel computes."""
_MOST_TENSORS = 16
"""Largest number of tensors in one launch. Each has its own code in the kernel."""
_OTHER_STEPS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's Adam with which its step is another one than the kernel's, or runs without the host."""


def kernel_updates(optimizer: torch.optim.Optimizer, master: Tensor, *, setting: AttentionKernel) -> bool:
    """Return whether the kernel can make this optimizer's steps for fp32 weights like `master`. `setting` is
    `engine.attention`."""
    if setting not in ("auto", "triton") or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    if any(group[name] for group in optimizer.param_groups for name in _OTHER_STEPS):
        return False
    return unsupported_device_reason(master) is None


def update_group(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    gradients: Sequence[Tensor],
    weights: Tensor,
    *,
    divisor: float,
) -> None:
    """Make Adam's step for a parameter group with one flat tensor of fp32 weights.

    The gradients, one after the other, are in the order of the flat tensor. They are divided by `divisor`. `weights`
    is the flat tensor that the model computes with. It receives the new weights.
    """
    (master,) = group["params"]
    state = optimizer.state[master]
    if not state:
        moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        state |= {"step": torch.zeros((), dtype=torch.float32)} | moments
    # The count is on the host. So the host knows the corrections, and waits for the device only after a start.
    state["step"] = state["step"].cpu() + 1
    count = float(state["step"])
    mean_kept, square_kept = group["betas"]
    is_decoupled = group["decoupled_weight_decay"]
    decay = group["weight_decay"] * (group["lr"] if is_decoupled else 1.0)
    rate = group["lr"] / (1 - mean_kept**count)
    root = math.sqrt(1 - square_kept**count)
    numbers = (divisor, decay, 1 - mean_kept, square_kept, 1 - square_kept, rate, root, group["eps"])
    flat_gradients = [gradient.view(-1) for gradient in gradients if gradient.numel()]
    sizes = [gradient.numel() for gradient in flat_gradients]
    columns: list[Sequence[Tensor]] = []
    for values in (weights, master, state["exp_avg"], state["exp_avg_sq"]):
        columns.append(values.detach().view(-1)[: sum(sizes)].split(sizes))
    columns.append(flat_gradients)
    for first in range(0, len(sizes), _MOST_TENSORS):
        some = slice(first, first + _MOST_TENSORS)
        tensors = [tuple(column[some]) for column in columns]
        start_step(tensors, tuple(sizes[some]), tuple(map(float, numbers)), is_decoupled=is_decoupled)


def start_step(
    tensors: Sequence[tuple[Tensor, ...]], sizes: tuple[int, ...], numbers: tuple[float, ...], *, is_decoupled: bool
) -> None:
    """Launch the kernel `kernels.adam.adam_step`. `tensors` are its arguments from WEIGHTS to GRADIENTS, and `numbers`
    those from `divisor` to `eps`."""
    from txl_dist.model.kernels.adam import adam_step

    num_programs = sum(math.ceil(size / _BLOCK) for size in sizes)
    kernel: Any = adam_step[(num_programs,)]
    weights, *_ = tensors
    with launching_on(weights[0]):
        kernel(*tensors, sizes, *numbers, IS_DECOUPLED=is_decoupled, BLOCK=_BLOCK)
