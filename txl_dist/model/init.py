"""Initial values of all parameters.

The values are the same as in `weights_init` of other Transformer-XL code, because Dai et al. 2019 give no formula.

    linear and embedding weights, attention biases u and v       N(0, init_std)
    embedding and output projections                             N(0, projection_init_std)
    layer-norm gains                                             N(1, init_std)
    every other bias                                             0
    last matrices of attention and feed-forward, `zero_init`     0
    residual scalars (`residual_scalars`)                        as in nanochat, from the first to the last layer:
                                                                 1.15 to 1.05 for x, 0.20 to 0.05 for x0
    shares of the first layer's values (`value_residual`)        0.5

A plugin's positional scheme may set other initial values in its method `reset_parameters`.
"""

from __future__ import annotations

import torch
from torch import nn

from txl_dist.config.schema import ModelSection


def initialize(module: nn.Module, model: ModelSection) -> None:
    """Set the initial values of all parameters of a model, in place.

    The values are drawn from torch's default generator, in the order in which the parameters' names first appear.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:  # it has a shape but no storage
            continue
        owner, _, leaf = name.rpartition(".")
        with torch.no_grad():
            if leaf == "scales":
                _, _, layer = owner.rpartition(".")
                depth = int(layer) / max(1, model.num_layers - 1)
                scales = [1.15 - 0.10 * depth, 0.20 - 0.15 * depth]
                parameter.copy_(torch.tensor(scales))
            elif leaf == "value_share":
                parameter.fill_(0.5)
            elif model.zero_init and name.endswith((".attention.output.weight", ".ff_out.weight")):
                parameter.zero_()
            elif leaf.startswith("projection_"):
                parameter.normal_(0.0, model.projection_init_std)
            elif leaf in ("content_bias", "position_bias"):
                parameter.normal_(0.0, model.init_std)
            elif "bias" in leaf:
                parameter.zero_()
            elif owner.endswith("norm"):
                parameter.normal_(1.0, model.init_std)
            else:
                parameter.normal_(0.0, model.init_std)
    if model.scheme.build is not None:
        _reset_positions(module)


def _reset_positions(module: nn.Module) -> None:
    """Call `reset_parameters` of the modules of a plugin's positional scheme that have this method."""
    for name, part in module.named_modules():
        reset = getattr(part, "reset_parameters", None)
        if not name.endswith(".attention.distance") or not callable(reset):
            continue
        if not any(parameter.is_meta for parameter in part.parameters()):
            with torch.no_grad():
                reset()
