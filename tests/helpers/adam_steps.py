"""Adam's step by the Triton kernel, compared with torch's Adam in fp64 on the CPU."""

from __future__ import annotations

import math

import torch

from txl_dist.train.engine.adam_update import update_group

SIZES = ((30, 50), (1,), (1037,))
"""Shapes of the gradients: less than two of the kernel's tiles, one value, and one value more than a tile of 1,024."""
SETTINGS = {"lr": 0.1, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.1}
DIVISOR = 3.0


def errors_of_adam(
    kind: type[torch.optim.Adam], *, device: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Make three steps with the kernel on the device, from gradients of this type. Return the relative errors of the
    fp32 weights, of the model's weights in bf16 and of the moments, by norms.

    `AdamW` decouples the weight decay. The flat tensors end with two values of padding, which must not change. Raises
    AssertionError if they do.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(sum(map(math.prod, SIZES)) + 2, generator=generator)
    ours, exact = start.to(device, copy=True).requires_grad_(), start.double().requires_grad_()
    optimizer, torchs = kind([ours], **SETTINGS), kind([exact], **SETTINGS)
    weights = torch.full(start.shape, 7.0, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        gradients = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
        exact.grad = torch.cat([*(x.view(-1) for x in gradients), torch.zeros(2)]).double() / DIVISOR
        exact.data[-2:] = 0  # so that the padding has no weight decay
        torchs.step()
        on_device = [gradient.to(device) for gradient in gradients]
        update_group(optimizer, optimizer.param_groups[0], on_device, weights, divisor=DIVISOR)
    state, expected = optimizer.state[ours], torchs.state[exact]
    pairs = {"master": (ours, exact), "weights": (weights, exact)}
    pairs |= {name: (state[name], expected[name]) for name in ("exp_avg", "exp_avg_sq")}
    found = {}
    for name, (values, right) in pairs.items():
        difference = values.detach().cpu().double()[:-2] - right.detach()[:-2]
        found[name] = (difference.norm() / right.detach()[:-2].norm()).item()
    assert float(state["step"]) == 3.0
    assert torch.equal(ours[-2:].cpu(), start[-2:])
    assert weights[-2:].tolist() == [7.0, 7.0]
    return found
