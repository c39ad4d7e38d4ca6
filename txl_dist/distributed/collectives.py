"""Process groups, collectives, and decisions that all ranks make together. All functions also work in a job of one
process.

The `deepspeed` launcher, torchrun and srun wrappers describe a job by the variables RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. Without these variables the job has one rank. On GPUs, collectives of tensors on the device
use NCCL, and collectives of tensors on the host use gloo. On CPUs all collectives use gloo.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from txl_dist.distributed.rank_environment import read_rank_environment
from txl_dist.distributed.rendezvous import free_port, rendezvous
from txl_dist.errors import ConfigError, LostRankError, TxlError, first_line

T = TypeVar("T")

_waiting: dict[int, int] = {}
"""Number of `waiting` blocks that each thread has entered and not left, by thread id."""


@dataclass(frozen=True)
class RankInfo:
    """Place of this process in a distributed job: its rank, the number of ranks, and its device."""

    rank: int
    """Number of this process in the job, from 0 to `world_size` - 1."""
    world_size: int
    """Number of ranks (processes) in the job."""
    local_rank: int
    """Number of this process on its machine, counted from 0. On GPUs it is the index of the GPU."""
    device: torch.device
    """Device on which this process computes, a GPU or the CPU."""
    num_threads: int
    """Number of CPU threads that torch uses in this process."""

    @property
    def is_rank0(self) -> bool:
        """Return whether this process is rank 0.

        Rank 0 prints, and makes every decision that depends on the clock or the disk.
        """
        return self.rank == 0


class StepFlags(NamedTuple):
    """Flags that the ranks exchange at the end of each training step.

    Each rank sets its own flags. `all_reduce_flags`, or the reduction of the step, combines them into the flags of the
    whole job.
    """

    stop: bool = False
    """True if this rank was asked to stop. In the flags of the job it is True if any rank was asked to stop."""
    written: bool = False
    """True if this rank has written its part of the pending checkpoint. In the flags of the job it is True if all ranks
    have written their parts."""
    save: bool = False
    """True if the clock of rank 0 says that it is time for a checkpoint. In the flags of the job it is True if any rank
    has set this flag."""


@contextmanager
def distributed_context(*, timeout_s: int, num_threads: int = 0, store: Store | None = None) -> Iterator[RankInfo]:
    """Join the job that the environment describes, and leave the job at the end of the block.

    `num_threads` is the number of CPU threads per rank. 0 means OMP_NUM_THREADS, or else the number of cores divided by
    the number of ranks on this machine. `timeout_s` is the longest wait for other ranks in seconds. `store` is a store
    through which all ranks are known to meet, or None for the rendezvous at MASTER_ADDR. Raises ConfigError if the
    launcher's variables contradict each other, or if ranks are missing after `timeout_s`. The message names the missing
    ranks. With `store` the errors are those of torch.
    """
    ranks = _join(timeout_s=timeout_s, num_threads=num_threads, store=store)
    try:
        yield ranks
    except TxlError as error:
        if error.rank is None:
            error.rank = ranks.rank
        # With a lost rank this would wait for it; on GPUs, for the ranks that are in a collective.
        if ranks.device.type == "cpu" and not isinstance(error, LostRankError):
            torch_dist.destroy_process_group()
        raise
    torch_dist.destroy_process_group()


def set_timeout(*, timeout_s: int) -> None:
    """Set the timeout of every process group, including groups that a library made.

    A group that `new_group` makes does not inherit the timeout of other groups.
    """
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        torch_dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def waiting() -> Iterator[None]:
    """Return a context manager whose block counts as waiting for other ranks, although the block calls no collective.

    An example is reading the result of a collective from the device. When the job hangs, the watchdog
    (train/monitoring/watchdog.py) does not suspect a rank that is in such a block.
    """
    thread = threading.get_ident()
    _waiting[thread] = _waiting.get(thread, 0) + 1
    try:
        yield
    finally:
        _waiting[thread] -= 1


def is_waiting(thread: int) -> bool:
    """Return whether the thread with this id is in a `waiting` block."""
    return _waiting.get(thread, 0) > 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return this tensor."""
    torch_dist.all_reduce(values)
    return values


def all_reduce_flags(votes: StepFlags, *, world_size: int) -> StepFlags:
    """Combine the flags of all ranks, and return the flags of the job. All ranks call this function together, between
    steps.

    Within a step this call is not needed, because the reduction of the step includes the flags.
    """
    counts = all_reduce_sum(torch.tensor(votes, dtype=torch.float32))
    num_stop, num_written, num_save = counts.tolist()
    return StepFlags(stop=num_stop > 0, written=num_written == world_size, save=num_save > 0)


def all_reduce_and(flag: bool) -> bool:
    """Return whether all ranks pass True. All ranks call this function together.

    The cost of a rank hardly grows with the number of ranks, unlike that of `gather_objects`.
    """
    num_false = all_reduce_sum(torch.tensor(float(not flag)))
    return num_false.item() == 0


def gather_on_rank0(value: T) -> list[T]:
    """Return the list of the values that the ranks pass, in rank order, on rank 0. The list is empty on other ranks."""
    gathered: list[Any] = []
    if torch_dist.get_rank() == 0:
        gathered = [None] * torch_dist.get_world_size()
    torch_dist.gather_object(value, gathered or None)
    return gathered


def gather_objects(value: T) -> list[T]:
    """Return the list of the values that the ranks pass, in rank order. Every rank gets the whole list, so the cost of
    each rank grows with the number of ranks."""
    gathered: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(gathered, value)
    return gathered


def ranks_with_same(value: object) -> list[int]:
    """Return the ranks that pass the same value as this rank, for instance the name of its node. This rank is one of
    them. All ranks call it together."""
    return [rank for rank, other in enumerate(gather_objects(value)) if other == value]


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. The values that other ranks pass are ignored."""
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank and return the result of this rank.

    If `action` raises on any rank, every rank raises. So no rank waits in the next collective for a rank that has
    failed. The error of the lowest rank that failed is raised. A TxlError is raised on every rank. Any other exception
    is raised unchanged on the rank where it occurred, and as a TxlError on the other ranks. `action` must not use
    collectives.
    """
    result: Any = None
    error: Exception | None = None
    report: TxlError | None = None
    try:
        result = action()
    except Exception as problem:  # noqa: BLE001  the other ranks must learn of any error
        error = problem
        rank = torch_dist.get_rank()
        if isinstance(problem, TxlError):
            report = problem
        else:
            report = TxlError(f"rank {rank} failed: {problem!r}.")
        report.rank = rank
    if all_reduce_and(report is None):
        return cast(T, result)
    for other in gather_objects(report):
        if other is None:
            continue
        if error is not None and other.rank == torch_dist.get_rank():
            raise error
        raise other
    return cast(T, result)


def run_on_rank0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only, and return its result on every rank. If `action` raises, every rank raises."""

    def run_if_rank0() -> T:
        if torch_dist.get_rank() == 0:
            return action()
        return cast(T, None)

    return broadcast_object(run_on_all_ranks(run_if_rank0))


def barrier() -> None:
    """Wait on the host until all ranks have called this function."""
    all_reduce_and(True)


def get_rank() -> int:
    """Return the rank of this process from the variable RANK, or 0 without this variable. The process need not have
    joined the job."""
    return int(os.environ.get("RANK", "0"))


def local_world_size(default: int) -> int:
    """Return the number of ranks on this machine, which deepspeed, torchrun or a script sets in a variable. Return
    `default` if the variable is not set."""
    local_size = os.environ.get("LOCAL_SIZE", str(default))
    return int(os.environ.get("LOCAL_WORLD_SIZE", local_size))


def uses_gpu() -> bool:
    """Return whether this process uses a GPU.

    DS_ACCELERATOR=cpu always means the CPU, even if DeepSpeed's launcher makes hidden GPUs visible to the ranks.
    """
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def _join(*, timeout_s: int, num_threads: int, store: Store | None) -> RankInfo:
    """Wait for all ranks, and make the process group. Raises ConfigError if ranks are missing or cannot connect."""
    is_known = store is not None
    place = read_rank_environment(os.environ)
    rank = place.rank
    world_size = place.world_size
    local_rank = place.local_rank
    # DeepSpeed reads these from the environment, also in a job of one rank.
    defaults = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "MASTER_ADDR": "127.0.0.1"}
    if "MASTER_PORT" not in os.environ:
        defaults["MASTER_PORT"] = free_port()
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    num_cores = len(os.sched_getaffinity(0))
    threads = num_threads or place.num_threads or max(1, num_cores // max(1, place.local_size))
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    backend = "gloo"
    problem = ""
    if uses_gpu():
        device = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
        if local_rank >= torch.cuda.device_count():
            problem = f"local rank {local_rank} has no GPU: the number of GPUs is {torch.cuda.device_count()}"
    if store is None:
        store = rendezvous(rank=rank, world_size=world_size, problem=problem, timeout_s=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch_dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:  # torch's errors of networks are RuntimeErrors
        if is_known:
            raise
        raise ConfigError(
            f"all ranks reached {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, but they cannot connect to "
            f"each other: {first_line(error)}. Set GLOO_SOCKET_IFNAME to the network interface that connects the "
            "nodes, and open all ports between the nodes."
        ) from error
    return RankInfo(rank=rank, world_size=world_size, local_rank=local_rank, device=device, num_threads=threads)
