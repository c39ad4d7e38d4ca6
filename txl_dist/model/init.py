"""Initial weights, all in one place (peers' `weights_init`; Dai et al. 2019 give no formula).

Linear and embedding weights and the attention biases u, v: N(0, init_std). Embedding and output projections:
N(0, projection_init_std). Layer-norm gains: N(1, init_std). Every other bias: 0.
"""

from __future__ import annotations

import torch
from torch import nn

from txl_dist.sections import ModelSection


def initialize(module: nn.Module, model: ModelSection) -> None:
    """Draw all parameters from torch's default generator, in the order of their names' first appearance."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta:  # no storage: only shapes are asked for
            continue
        owner, leaf = name.rpartition(".")[::2]
        with torch.no_grad():
            if leaf.startswith("projection_"):
                parameter.normal_(0.0, model.projection_init_std)
            elif leaf in ("content_bias", "position_bias"):
                parameter.normal_(0.0, model.init_std)
            elif "bias" in leaf:
                parameter.zero_()
            elif owner.endswith("norm"):
                parameter.normal_(1.0, model.init_std)
            else:
                parameter.normal_(0.0, model.init_std)
