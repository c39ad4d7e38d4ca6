"""Imports that the server of ranks makes once before it forks: all modules of a training process, also late imports.

The modules of the commands after a training are included. The first parsing of flags is included too, because it
imports modules and fills caches.
"""

import atexit
import gc
import importlib
from pathlib import Path

import torch

from txl_dist.cli.main import TrainArguments
from txl_dist.cli.parsing import parse
from txl_dist.config.load import Config
from txl_dist.train.engine.zero import import_deepspeed

MODULES = (
    "txl_dist.train.start",
    "txl_dist.evaluation.evaluate",
    "txl_dist.convert.export",
    "txl_dist.cli.prompts",
    "txl_dist.report.model_page",
    "txl_dist.report.report",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "numpy.ma",
    "torch.utils.tensorboard",
    "tensorboard.plugins.hparams.summary_v2",
    "torch._dynamo",  # imported with the first optimizer
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "deepspeed.module_inject.auto_ep_layer",  # this and the next ones are imported with the first engine
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiles a function when it is imported
    "deepspeed.utils.pin_memory",
)

torch.set_num_threads(1)
import_deepspeed()
for name in MODULES:
    importlib.import_module(name)
parse(TrainArguments, ["--run.seed", "2"], prog="txl train", default=TrainArguments(Path("x"), settings=Config()))
gc.freeze()  # DeepSpeed collects garbage when it builds an engine; modules' objects need not be searched
atexit.register(gc.unfreeze)  # otherwise a library reports leaks at exit
