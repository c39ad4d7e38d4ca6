"""Parameter groups and the optimizer, always in torch's fused form.

DeepSpeed's own CPU Adam would be compiled at the first start and brings nothing here: the fused torch kernels are
as fast, exist on every device, and ZeRO accepts them.
"""

from __future__ import annotations

import torch
from torch import nn

from txl_dist.config import OptimSection


def build_optimizer(module: nn.Module, optim: OptimSection) -> torch.optim.Optimizer:
    """Adam or AdamW over two groups: decayed (matrices) and not decayed (biases, norms, attention biases)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".")[2]
        (kept if "bias" in leaf or "norm." in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
