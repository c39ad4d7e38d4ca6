"""How fast the ranks of a job reach each other, measured within a bounded time.

    reduce     all-reduces of growing size over all ranks (NCCL between GPUs, gloo between CPUs); larger ones are left
               out once one took half a second. Bus bandwidth = 2 (W - 1) / W * bytes / s: what a link carries
    peers      rank 0 and one rank of every other node, or on one node every other rank, in turn, over gloo: round trip
               (of the fastest) and throughput of 1 MiB both ways

A rank that stands still ends in a message, as the groups of the ranks have a time limit, and not in silence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as torch_dist

from txl_dist.dist import Ranks, barrier, from_first, gather_objects

MIB = 2**20
SIZES_BYTES = (4096, 256 * 1024, 4 * MIB, 64 * MIB)
REPEAT_FOR_S = 0.3
ENOUGH_S = 0.5
PEERS_FOR_S = 30.0
NUM_PINGS = 8


class Reduce(NamedTuple):
    """An all-reduce of one size."""

    num_bytes: int
    ms: float
    bus_gb_s: float
    """1e9 bytes per second."""


class Peer(NamedTuple):
    """A rank as rank 0 reaches it."""

    rank: int
    round_trip_ms: float
    mib_s: float
    """Of 1 MiB there and back."""


def measure_reduce(ranks: Ranks) -> list[Reduce]:
    """All ranks: time all-reduces. The figures are those of the slowest rank."""
    found: list[Reduce] = []
    for num_bytes in SIZES_BYTES:
        values = torch.zeros(num_bytes // 4, device=ranks.device)
        for _ in range(2):  # the first one connects
            first_s = from_first(_time_reduces(values, count=1))
        seconds = max(gather_objects(_time_reduces(values, count=from_first(int(1 + min(50, REPEAT_FOR_S / first_s))))))
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


def measure_peers(ranks: Ranks, peers: Sequence[int]) -> list[Peer]:
    """All ranks: rank 0 with each of `peers` in turn; the result is rank 0's, on all. Some may be left out for time."""
    found, end_s = [], time.monotonic() + PEERS_FOR_S
    go, ping, piece = torch.zeros(1), torch.zeros(1), torch.zeros(MIB // 4)
    for peer in peers:
        if ranks.is_first:
            go[0] = time.monotonic() < end_s
            torch_dist.send(go, dst=peer)
            if go.item():
                round_trip_s = min(_there_and_back(ping, peer) for _ in range(NUM_PINGS))
                found.append(Peer(peer, 1000 * round_trip_s, 4 / sum(_there_and_back(piece, peer) for _ in range(2))))
        elif ranks.rank == peer:
            torch_dist.recv(go, src=0)
            for tensor in [ping] * NUM_PINGS + [piece] * 2 if go.item() else []:
                torch_dist.recv(tensor, src=0)
                torch_dist.send(tensor, dst=0)
    return from_first(found)


def _there_and_back(tensor: torch.Tensor, peer: int) -> float:
    """Seconds."""
    start_s = time.perf_counter()
    torch_dist.send(tensor, dst=peer)
    torch_dist.recv(tensor, src=peer)
    return time.perf_counter() - start_s
