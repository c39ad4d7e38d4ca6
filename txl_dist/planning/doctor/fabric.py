"""Speed of the network between the ranks of a job, measured within a bounded time.

`measure_reduce` times all-reduces of growing size over all ranks, by NCCL between GPUs and by gloo between CPUs. It
stops after the first size that takes half a second. Bus bandwidth is 2 (W - 1) / W * bytes / s for W ranks, which is
the traffic of one link. If a rank hangs, the check ends with an error message, because the process groups have a time
limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from txl_dist.distributed.collectives import RankInfo, barrier, broadcast_object, gather_objects

MIB = 2**20
SIZES_BYTES = (4096, 256 * 1024, 4 * MIB, 64 * MIB)
REPEAT_FOR_S = 0.3
"""Number of seconds for which an all-reduce of one size is repeated, at most 51 times."""
ENOUGH_S = 0.5
"""If one all-reduce takes more than this many seconds, larger sizes are not measured."""


@dataclass(frozen=True)
class Reduce:
    """Time of an all-reduce of one size over all ranks."""

    num_bytes: int
    ms: float
    bus_gb_s: float
    """Bus bandwidth in 1e9 bytes per second."""


def measure_reduce(ranks: RankInfo) -> list[Reduce]:
    """Time all-reduces of growing size over all ranks. The slowest rank determines each time.

    All ranks must call this function.
    """
    reduces: list[Reduce] = []
    for num_bytes in SIZES_BYTES:
        values = torch.zeros(num_bytes // 4, device=ranks.device)
        for _ in range(2):  # the first one connects
            first_s = broadcast_object(_time_reduces(values, count=1))
        count = broadcast_object(int(1 + min(50, REPEAT_FOR_S / first_s)))
        seconds = max(gather_objects(_time_reduces(values, count=count)))
        bus_gb_s = 2 * (ranks.world_size - 1) / ranks.world_size * num_bytes / seconds / 1e9
        reduces.append(Reduce(num_bytes, 1000 * seconds, bus_gb_s))
        if max(first_s, seconds) > ENOUGH_S:
            break
    return reduces


def _time_reduces(values: torch.Tensor, *, count: int) -> float:
    """Return the mean time of one all-reduce on this rank, in seconds."""
    barrier()
    start_s = time.perf_counter()
    for _ in range(count):
        torch_dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / count
