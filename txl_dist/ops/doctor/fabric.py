"""How the ranks of a job reach each other, measured within a bounded time: do all come, how fast, by which clock.

    meeting    a store at MASTER_ADDR:MASTER_PORT, where rank 0 counts who has come and tells all who has not
    reduce     all-reduces of growing size over all ranks (NCCL between GPUs, gloo between CPUs); larger ones are left
               out once one took half a second. Bus bandwidth = 2 (W - 1) / W * bytes / s: what a link carries
    peers      rank 0 and one rank of every other node, or on one node every other rank, in turn, over gloo: round trip,
               throughput of 1 MiB both ways, and how far the other clock is ahead (of the fastest round trip)
    speed      the same matrix products on all ranks at once: who computes slower than the others

Every wait has a limit, so a node that does not come, or stands still, ends in a message and not in silence.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from txl_dist.dist import Ranks, barrier, from_first, gather_objects, uses_gpu
from txl_dist.errors import ConfigError

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
    ahead_s: float
    """Its clock, less that of rank 0."""


def is_job() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


@contextmanager
def meeting(*, timeout_s: int) -> Iterator[Ranks]:
    """Join the other ranks, and leave them at the end.

    Raises ConfigError, on every rank that came, if one has not come after `timeout_s`, or if they cannot connect.
    """
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the launcher set no good RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT: {error}. Start with "
            "deepspeed, torchrun, or srun with those variables."
        ) from error
    device = torch.device("cuda", local_rank) if uses_gpu() else torch.device("cpu")
    problem = ""
    if device.type == "cuda" and local_rank >= torch.cuda.device_count():
        problem = f"local rank {local_rank} has no GPU of its own: there are {torch.cuda.device_count()}"
    store = _store(address, port, rank=rank, world_size=world_size, timeout_s=timeout_s)
    _roll_call(store, rank=rank, world_size=world_size, problem=problem, timeout_s=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        torch_dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"all ranks came to {address}:{port}, but cannot connect to each other: {_first_line(error)}. Set "
            "GLOO_SOCKET_IFNAME to the interface between the nodes, and open all ports between them."
        ) from error
    yield Ranks(rank, world_size, local_rank, device, torch.get_num_threads())
    barrier()  # the store lives in rank 0
    torch_dist.destroy_process_group()


def _store(address: str, port: int, *, rank: int, world_size: int, timeout_s: int) -> TCPStore:
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun made it
    try:
        return TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not has_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (torch_dist.DistNetworkError, torch_dist.DistStoreError) as error:
        if rank == 0:
            message = f"rank 0 cannot listen at port {port}: {_first_line(error)}. Give --master_port of the launcher."
        else:
            message = (
                f"rank {rank} on {socket.gethostname()} found no rank 0 at {address}:{port} in {timeout_s} s. See "
                "whether it has started there, and whether a firewall is between."
            )
        raise ConfigError(message) from error


def _roll_call(store: Store, *, rank: int, world_size: int, problem: str, timeout_s: int) -> None:
    """Rank 0 counts who is here and tells all. Raises ConfigError on all that are, naming those that are not."""
    store.set(f"here/{rank}", json.dumps([socket.gethostname(), problem]))
    if rank == 0:
        end_s = time.monotonic() + timeout_s
        missing = list(range(1, world_size))
        while (missing := [r for r in missing if not store.check([f"here/{r}"])]) and time.monotonic() < end_s:
            time.sleep(0.1)
        here = {r: json.loads(store.get(f"here/{r}")) for r in range(world_size) if r not in missing}
        store.set("answer", _answer(here, missing, timeout_s=timeout_s))
    try:
        store.wait(["answer"], timedelta(seconds=timeout_s + 30))
        answer = store.get("answer").decode()
    except (torch_dist.DistNetworkError, torch_dist.DistStoreError) as error:
        raise ConfigError(f"rank 0 came and then fell silent: {_first_line(error)}. See what it printed.") from error
    if answer:
        # Rank 0, which holds the store, leaves when all have read the answer.
        store.add("read", 1)
        end_s = time.monotonic() + 5
        while rank == 0 and store.add("read", 0) < len(here) and time.monotonic() < end_s:
            time.sleep(0.05)
        raise ConfigError(answer)


def _answer(here: dict[int, list[str]], missing: Sequence[int], *, timeout_s: int) -> str:
    """What is wrong with those who came, or with who did not; empty if nothing."""
    if missing:
        hosts = ", ".join(f"{host} (rank {_ranges(ranks)})" for host, ranks in _by_host(here).items())
        return (
            f"rank {_ranges(missing)} of {len(here) + len(missing)} did not come in {timeout_s} s; here are {hosts}. "
            "See on the nodes that are not in this list whether the program started and reaches this one."
        )
    problems = [f"{host}, rank {rank}: {problem}" for rank, (host, problem) in here.items() if problem]
    return f"{'; '.join(problems)}. Start fewer ranks on that node." if problems else ""


def _by_host(here: dict[int, list[str]]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, (host, _) in here.items():
        hosts.setdefault(host, []).append(rank)
    return hosts


def _ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
    go, piece = torch.zeros(1), torch.zeros(MIB // 4)
    for peer in peers:
        if ranks.is_first:
            go[0] = time.monotonic() < end_s
            torch_dist.send(go, dst=peer)
            if go.item():
                found.append(_ping(peer, piece))
        elif ranks.rank == peer:
            torch_dist.recv(go, src=0)
            if go.item():
                _echo(piece)
    return from_first(found)


def _ping(peer: int, piece: torch.Tensor) -> Peer:
    times = []
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_PINGS):
        start_s = time.time()
        torch_dist.send(clock, dst=peer)
        torch_dist.recv(clock, src=peer)
        end_s = time.time()
        times.append((end_s - start_s, clock.item() - (start_s + end_s) / 2))
    round_trip_s, ahead_s = min(times)
    start_s = time.perf_counter()
    for _ in range(2):
        torch_dist.send(piece, dst=peer)
        torch_dist.recv(piece, src=peer)
    return Peer(peer, 1000 * round_trip_s, 4 / (time.perf_counter() - start_s), ahead_s)


def _echo(piece: torch.Tensor) -> None:
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_PINGS):
        torch_dist.recv(clock, src=0)
        clock[0] = time.time()
        torch_dist.send(clock, dst=0)
    for _ in range(2):
        torch_dist.recv(piece, src=0)
        torch_dist.send(piece, dst=0)


def measure_speed(ranks: Ranks) -> list[float]:
    """All ranks, at once: TFLOP/s of each in matrix products of fp32 on CPUs, bf16 on GPUs."""
    is_gpu = ranks.device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if is_gpu else (512, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=ranks.device)
    torch.mm(matrix, matrix)
    barrier()
    start_s, num_products = time.perf_counter(), 0
    while time.perf_counter() - start_s < REPEAT_FOR_S:
        for _ in range(4):
            torch.mm(matrix, matrix)
        num_products += 4
        if is_gpu:
            torch.cuda.synchronize()
    return gather_objects(2 * size**3 * num_products / (time.perf_counter() - start_s) / 1e12)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
