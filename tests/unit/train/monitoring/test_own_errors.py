"""An error of a rank itself is told from an error that the loss of another rank may have caused."""

import types

import pytest
import torch
import torch.distributed as torch_dist

from txl_dist.errors import ConfigError
from txl_dist.train.monitoring.watchdog import may_come_from_loss


def raised_in(module: str, error: Exception) -> Exception:
    """An error with a traceback through a function of this module."""
    place = types.ModuleType(module)
    exec("def collective(error):\n    raise error", place.__dict__)
    with pytest.raises(type(error)) as caught:
        place.collective(error)
    return caught.value


def test_errors_of_collectives_and_networks_may_come_from_a_loss() -> None:
    for error in (
        raised_in("torch.distributed.distributed_c10d", ValueError("no reason")),
        raised_in("deepspeed.comm.comm", RuntimeError("no reason")),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("NCCL communicator was aborted on rank 1"),
        torch_dist.DistNetworkError("no reason"),
        ConnectionResetError(),
    ):
        assert may_come_from_loss(error), error


def test_errors_of_the_ranks_own_code_do_not() -> None:
    for error in (
        raised_in("txl_dist.train.loop", RuntimeError("injected fault")),
        ConfigError("train.max_steps=0 must be positive. Raise it."),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes"),
        IndexError("index 300 is out of bounds for dimension 0 with size 257"),
    ):
        assert not may_come_from_loss(error), error
