"""Ranks and what they decide together. Everything here works for a single process too.

The `deepspeed` launcher, torchrun and srun wrappers all describe a job by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT; without them this is a job of one rank. On GPUs collectives of device tensors use NCCL and those of
host tensors gloo; on CPUs all use gloo.
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

from txl_dist.distributed.rank_environment import read_rank_environment
from txl_dist.distributed.rendezvous import first_line, free_port, rendezvous
from txl_dist.errors import ConfigError, LostRankError, TxlError

T = TypeVar("T")

_waiting: dict[int, int] = {}
"""By thread, where it waits: in how many `waiting` it is."""


@dataclass(frozen=True)
class RankInfo:
    """Who this process is."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    num_threads: int
    """CPU threads that torch uses in this process."""

    @property
    def is_rank0(self) -> bool:
        """Rank 0 decides everything that touches clock or disk, and speaks."""
        return self.rank == 0


class StepFlags(NamedTuple):
    """What a rank has to say at the end of a step; or, once all have, what holds for the job."""

    stop: bool = False
    """This rank was asked to stop; any was."""
    written: bool = False
    """This rank has written its part of the checkpoint in flight; all have."""
    save: bool = False
    """The clock of this rank, which is rank 0, says that a checkpoint is due; any does."""


@contextmanager
def distributed_context(*, timeout_s: int, num_threads: int = 0) -> Iterator[RankInfo]:
    """Join the job that the environment describes, and leave it at the end.

    `num_threads` is per rank; 0 takes OMP_NUM_THREADS, else cores // local ranks.
    Raises ConfigError if the launcher's variables make no sense, or naming the ranks that have not come in time.
    """
    ranks = _join(timeout_s=timeout_s, num_threads=num_threads)
    try:
        yield ranks
    except TxlError as error:
        error.rank = ranks.rank if error.rank is None else error.rank
        # Not where a rank is lost: it could wait for that one.
        if ranks.device.type == "cpu" and not isinstance(error, LostRankError):
            torch_dist.destroy_process_group()  # on GPUs it could wait for ranks that are in a collective
        raise
    torch_dist.destroy_process_group()


def set_timeout(*, timeout_s: int) -> None:
    """Give every process group the timeout, also those that a library made: `new_group` does not inherit it."""
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        torch_dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def waiting() -> Iterator[None]:
    """Around what waits for other ranks without being a collective of torch, such as reading on the host what one left
    on the device: a rank in here is not the one that the others wait for (train/monitoring/watchdog.py)."""
    thread = threading.get_ident()
    _waiting[thread] = _waiting.get(thread, 0) + 1
    try:
        yield
    finally:
        _waiting[thread] -= 1


def is_waiting(thread: int) -> bool:
    """Whether the thread of this number is in `waiting`."""
    return _waiting.get(thread, 0) > 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    torch_dist.all_reduce(values)
    return values


def all_reduce_flags(votes: StepFlags, *, world_size: int) -> StepFlags:
    """What holds for the job, between steps; within one it is told by the step's decision. All ranks call it."""
    stops, writtens, saves = all_reduce_sum(torch.tensor(votes, dtype=torch.float32)).tolist()
    return StepFlags(stop=stops > 0, written=writtens == world_size, save=saves > 0)


def gather_objects(value: T) -> list[T]:
    """The value of every rank, in rank order, on every rank."""
    gathered: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank; what the other ranks pass is ignored."""
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it raises on any, every rank raises, naming the lowest such rank.

    So no rank is left waiting in the next collective for one that gave up. A TxlError is the same on every rank;
    anything else is raised as it is where it happened, and as a TxlError elsewhere. `action` must not use
    collectives.
    """
    result: Any = None
    error: Exception | None = None
    report: TxlError | None = None
    try:
        result = action()
    except Exception as problem:  # noqa: BLE001  whatever it is, the other ranks must learn of it
        error = problem
        rank = torch_dist.get_rank()
        report = problem if isinstance(problem, TxlError) else TxlError(f"rank {rank} failed: {problem!r}.")
        report.rank = rank
    for other in gather_objects(report):
        if other is not None:
            raise error if error is not None and other.rank == torch_dist.get_rank() else other
    return cast(T, result)


def run_on_rank0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; its result, or its TxlError, is every rank's."""
    return broadcast_object(run_on_all_ranks(lambda: action() if torch_dist.get_rank() == 0 else cast(T, None)))


def barrier() -> None:
    """Wait for all ranks, on the host."""
    gather_objects(None)


def get_rank() -> int:
    """The rank of this process, also before and after it has joined."""
    return int(os.environ.get("RANK", "0"))


def local_world_size(default: int) -> int:
    """Ranks of this machine, as deepspeed, torchrun or a script says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", str(default))))


def uses_gpu() -> bool:
    """Whether this process works on a GPU. Whoever asks DeepSpeed for the CPU gets it, although its launcher may show
    hidden GPUs to the ranks again."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def _join(*, timeout_s: int, num_threads: int) -> RankInfo:
    place = read_rank_environment(os.environ)
    rank, world_size, local_rank = place.rank, place.world_size, place.local_rank
    # DeepSpeed reads these from the environment, also in a job of one rank.
    defaults = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "MASTER_ADDR": "127.0.0.1"}
    if "MASTER_PORT" not in os.environ:
        defaults["MASTER_PORT"] = free_port()
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    threads = num_threads or place.num_threads or max(1, len(os.sched_getaffinity(0)) // max(1, place.local_size))
    torch.set_num_threads(threads)
    device, backend, problem = torch.device("cpu"), "gloo", ""
    if uses_gpu():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        if local_rank >= torch.cuda.device_count():
            problem = f"local rank {local_rank} has no GPU of its own: there are {torch.cuda.device_count()}"
    store = rendezvous(rank=rank, world_size=world_size, problem=problem, timeout_s=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch_dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:  # torch's errors of networks are RuntimeErrors
        raise ConfigError(
            f"all ranks came to {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, but cannot connect to each "
            f"other: {first_line(error)}. Set GLOO_SOCKET_IFNAME to the interface between the nodes, and open all "
            "ports between them."
        ) from error
    return RankInfo(rank=rank, world_size=world_size, local_rank=local_rank, device=device, num_threads=threads)
