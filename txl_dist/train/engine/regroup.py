"""Leaving the process groups so that the same process can make new ones and a new engine. All private names are here.

torch and DeepSpeed expect one job per process. Some of their state outlives the groups and the engine, and differs
between a process that stayed and its new peers:

    torch: number of groups made       part of the names under which ranks look for each other in the store
    DeepSpeed: references to groups    keep the sockets of the groups open
    DeepSpeed: ids of parameters       ZeRO-3 compares them between ranks
    DeepSpeed: ids of modules          a default argument that counts on. ZeRO-3 compares them too

`check_regroup` refuses versions that have other names, before a run begins.
"""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch.distributed as torch_dist

from txl_dist.errors import ConfigError

_NAMES = (
    ("torch.distributed.distributed_c10d", "_world.group_count"),
    ("deepspeed.utils.groups", "_release_process_group_references"),
    ("deepspeed.runtime.zero.partition_parameters", "Init.param_id"),
    ("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__"),
)
"""Private names that `leave_groups` uses: module, and path of the attribute."""


def check_regroup() -> None:
    """Raise ConfigError if this version of torch or DeepSpeed lacks a name that `leave_groups` uses."""
    for module, path in _NAMES:
        try:
            _attribute(module, path)
        except (ImportError, AttributeError):
            package = module.partition(".")[0]
            raise ConfigError(
                f"recover.spares: {package} {version(package)} has no {module}.{path}, so ranks cannot regroup. "
                f"Install the version of {package} that constraints.txt lists, or set recover.spares to 0."
            ) from None


def leave_groups() -> None:
    """Destroy all process groups, and reset what torch and DeepSpeed count. The engine must be closed before.

    A process that calls this function is like a new process to its peers. It uses no collective.
    """
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    _attribute("deepspeed.utils.groups", "_release_process_group_references")(None)
    _attribute("torch.distributed.distributed_c10d", "_world").group_count = 0
    _attribute("deepspeed.runtime.zero.partition_parameters", "Init").param_id = 0
    counter = _attribute(*_NAMES[3])[0]
    counter[:] = [0]
    gc.collect()


def _attribute(module: str, path: str) -> Any:
    """Return an attribute of a module by its path. Raises ImportError or AttributeError if there is none."""
    value: Any = import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value
