"""The optimizer of a run and its parameter groups.

The optimizers adam, adamw and sgd are torch's optimizers in fused form. They exist on every device, and ZeRO accepts
them. DeepSpeed's own CPU Adam would be compiled at the first start, and is not faster. The optimizer lamb comes from
pytorch_optimizer. Its settings give it the same step as NVIDIA's code (DeepLearningExamples, lamb.py). With g the
clipped gradient:

    m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2    s = m / (sqrt(v) + eps) + decay w    no bias correction
    w = w - lr s min(|w|, 10) / (|s| + eps)             the ratio is 1 where |w| or |s| is 0

The norms are computed over whole tensors, so the result of lamb depends on which weights share a tensor. Here queries
have their own tensor. In NVIDIA's code queries, keys and values share one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from txl_dist.config.registry import plugin_errors
from txl_dist.config.schema import OPTIMIZERS, OptimSection
from txl_dist.errors import ConfigError, raised_everywhere
from txl_dist.train.engine.muon import Muon


def is_decayed(name: str) -> bool:
    """Return whether a parameter of the model gets weight decay. Matrices get weight decay. Biases, norms and scalars
    get no weight decay."""
    leaf = name.rpartition(".")[2]
    return "bias" not in leaf and "norm." not in name and leaf not in ("scales", "value_share")


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimSection, *, matrices: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer with its parameter groups.

    The first group contains the parameters named in `matrices`, if there are any. The next group contains the other
    parameters with weight decay. The last group contains the parameters without weight decay. `parameters` are (name,
    tensor) pairs. A flat parameter may have the name of any parameter in it. `matrices` are the names of the parameters
    that muon orthogonalizes. Raises ConfigError if the optimizer of a plugin cannot be used.
    """
    orthogonal: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in parameters:
        (orthogonal if name in matrices else decayed if is_decayed(name) else kept).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "decays": True}, {"params": kept, "decays": False}]
    if orthogonal:
        groups.insert(0, {"params": orthogonal, "decays": True, "is_orthogonal": True})
    # Every step sets the rate. In half precision at stage 0 DeepSpeed makes a first step with zero gradients. At a rate
    # of 0 it moves no weight, and `ZeroEngine` clears the state that it leaves.
    build = optim.kind.build or BUILDERS[optim.name]
    with plugin_errors(OPTIMIZERS, optim.name, what="optimizer"):
        optimizer: torch.optim.Optimizer = build(groups, lr=0.0)
    _check_built(optimizer, optim.name)
    apply_settings(optimizer.param_groups, optim)
    return optimizer


def _check_built(optimizer: object, name: str) -> None:
    """Raise ConfigError on all ranks if a build function has not returned a usable optimizer.

    The result must be a torch optimizer. It must have no state yet, because ZeRO would lose that state.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise raised_everywhere(
            ConfigError(
                f"optim.name = {name!r}: the build function returned a {type(optimizer).__name__}. It must return a "
                "torch.optim.Optimizer for the groups that it receives."
            )
        )
    if optimizer.state:
        raise raised_everywhere(
            ConfigError(
                f"optim.name = {name!r}: {type(optimizer).__name__} makes its state before the first step. ZeRO "
                "would lose this state. Make the state in step()."
            )
        )


def apply_settings(groups: list[dict[str, Any]], optim: OptimSection) -> None:
    """Write the optimizer's settings into parameter groups. The weight decay is written only into groups whose
    parameters get weight decay."""
    settings = {name: getattr(optim, name) for name in optim.kind.settings}
    for group in groups:
        group |= settings | {"weight_decay": optim.weight_decay if group["decays"] else 0.0}


def _lamb(groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    """Build LAMB with the step of NVIDIA's code."""
    # Imported here, because the library has a hundred optimizers and takes half a second to import.
    from pytorch_optimizer import Lamb

    # adam_debias is the library's name for a step that is not divided by 1 - b1^t.
    return Lamb(groups, lr=lr, weight_decouple=False, grad_averaging=True, pre_norm=False, adam_debias=True)


BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
    "lamb": _lamb,
    "muon": Muon,
    "sgd": partial(torch.optim.SGD, fused=True),
}
"""Functions that build an optimizer from groups and a learning rate, by `optim.name`.

`schema.OPTIMIZERS` has the other properties of each optimizer.
"""
