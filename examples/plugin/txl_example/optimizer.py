"""Lion (Chen et al. 2023): the sign of a moving average of the gradients."""

from collections.abc import Callable
from typing import Any

import torch

from txl_dist import plugins


class Lion(torch.optim.Optimizer):
    """Groups carry `lr`, `betas` and `weight_decay`."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient."""
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = torch.lerp(parameter.grad, average, beta_1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta_2)


plugins.register_optimizer("lion", Lion, settings=("betas",), state_bytes=lambda optim: 4)
