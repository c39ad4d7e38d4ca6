"""Parameter groups and the optimizer, always in torch's fused form.

DeepSpeed's own CPU Adam would be compiled at the first start and brings nothing here: the fused torch kernels are
as fast, exist on every device, and ZeRO accepts them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from txl_dist.sections import OptimSection


def build_optimizer(module: nn.Module, optim: OptimSection) -> torch.optim.Optimizer:
    """Adam or AdamW over two groups: decayed (matrices) and not decayed (biases, norms, attention biases)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".")[2]
        (kept if "bias" in leaf or "norm." in name else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "decays": True}, {"params": kept, "decays": False}]
    kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    optimizer = kind(groups, lr=optim.lr, fused=True)
    apply_settings(optimizer.param_groups, optim)
    return optimizer


def apply_settings(groups: list[dict[str, Any]], optim: OptimSection) -> None:
    """Put the settings into parameter groups: also after a checkpoint has restored the ones it was saved with."""
    for group in groups:
        decay = optim.weight_decay if group["decays"] else 0.0
        group |= {"betas": optim.betas, "eps": optim.eps, "weight_decay": decay}
