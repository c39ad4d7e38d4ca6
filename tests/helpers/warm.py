"""What the rank server imports once, before it forks: all that a training process imports, late imports included."""

import importlib

import torch

from txl_dist.train.engine.zero import import_deepspeed

MODULES = (
    "txl_dist.cli",
    "txl_dist.train.start",
    "torch.utils.tensorboard",
    "torch._dynamo",  # with the first optimizer
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiles a function when it is imported
)

torch.set_num_threads(1)
import_deepspeed()
for name in MODULES:
    importlib.import_module(name)
