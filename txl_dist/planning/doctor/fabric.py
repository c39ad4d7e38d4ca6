"""How fast the ranks of a job reach each other, measured within a bounded time.

    reduce     all-reduces of growing size over all ranks (NCCL between GPUs, gloo between CPUs); larger ones are left
               out once one took half a second. Bus bandwidth = 2 (W - 1) / W * bytes / s: what a link carries

A rank that stands still ends in a message, as the groups of the ranks have a time limit, and not in silence.
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
ENOUGH_S = 0.5


@dataclass(frozen=True)
class Reduce:
    """An all-reduce of one size."""

    num_bytes: int
    ms: float
    bus_gb_s: float
    """1e9 bytes per second."""


def measure_reduce(ranks: RankInfo) -> list[Reduce]:
    """All ranks: time all-reduces. The figures are those of the slowest rank."""
    found: list[Reduce] = []
    for num_bytes in SIZES_BYTES:
        values = torch.zeros(num_bytes // 4, device=ranks.device)
        for _ in range(2):  # the first one connects
            first_s = broadcast_object(_time_reduces(values, count=1))
        seconds = max(
            gather_objects(_time_reduces(values, count=broadcast_object(int(1 + min(50, REPEAT_FOR_S / first_s)))))
        )
        bus = 2 * (ranks.world_size - 1) / ranks.world_size * num_bytes / seconds / 1e9
        found.append(Reduce(num_bytes, 1000 * seconds, bus))
        if max(first_s, seconds) > ENOUGH_S:
            break
    return found


def _time_reduces(values: torch.Tensor, *, count: int) -> float:
    """Seconds for one."""
    barrier()
    start_s = time.perf_counter()
    for _ in range(count):
        torch_dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / count
