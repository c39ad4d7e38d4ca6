"""Rendezvous of the ranks of a job within a time limit. If ranks are missing, the error message names them.

    store     key-value store at MASTER_ADDR:MASTER_PORT, in the process of rank 0 or of torchrun
    answer    rank 0 counts the ranks that arrive, and writes to the store which ranks are missing or have a problem

Every wait has a limit. So if a node does not arrive, the other nodes print a message instead of waiting forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from txl_dist.console.echo import echo
from txl_dist.distributed.rank_environment import RUN_ALONE, format_ranks
from txl_dist.errors import ConfigError, first_line

NO_ANSWER_S = 30
"""Seconds, in addition to the timeout, that the ranks wait for the answer of rank 0."""
SAY_AFTER_S = 3.0
"""Seconds that a rank waits before it prints a line with the missing ranks."""
_PIECE_S = 1.0
"""Longest time in seconds of one wait in torch. A longer wait is divided into several waits, because torch does not
react to signals while it waits."""

_LOWEST_PORT = 20000
"""Lowest port that `free_port` returns. Well-known services listen below it."""
_END_OF_PORTS = 29500
"""End of its range: the default port of DeepSpeed and torch. Ports of Kubernetes services follow it."""
_MAX_PROBES = 100
"""Number of ports that `free_port` tries before it lets the kernel choose."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
"""Seconds between two looks of rank 0 for the other ranks, at the start of its wait and after a few seconds."""


def rendezvous(*, rank: int, world_size: int, problem: str, timeout_s: int) -> Store:
    """Wait for all ranks, and return the store that they share.

    `problem` is the reason why this rank cannot take part, or an empty text. Raises ConfigError on every rank that has
    arrived, if a rank is missing after `timeout_s` seconds or a rank has a problem.
    """
    store = _store(rank=rank, world_size=world_size, timeout_s=timeout_s)
    store.set(f"here/{rank}", json.dumps([socket.gethostname(), problem]))
    if rank == 0:
        missing = _wait_for_ranks(store, world_size=world_size, timeout_s=timeout_s)
        present = [other for other in range(world_size) if other not in missing]
        here = {other: json.loads(store.get(f"here/{other}")) for other in present}
        store.set("answer", verdict(here, missing, timeout_s=timeout_s))
    try:
        _wait_for_answer(store, timeout_s=timeout_s + NO_ANSWER_S)
        answer = store.get("answer").decode()
    except (DistNetworkError, DistStoreError) as error:
        raise ConfigError(
            f"rank 0 connected and then stopped responding: {first_line(error)}. See the output of rank 0."
        ) from error
    if answer:
        # Rank 0, which holds the store, leaves after all ranks have read the answer.
        store.add("read", 1)
        end_s = time.monotonic() + 5
        while rank == 0 and store.add("read", 0) < len(here) and time.monotonic() < end_s:
            time.sleep(0.05)
        raise ConfigError(answer)
    return store


def _wait_for_ranks(store: Store, *, world_size: int, timeout_s: int) -> list[int]:
    """Wait on rank 0 for the other ranks. Returns the ranks that are still missing after `timeout_s` seconds.

    The store is asked once per look for all ranks together, and rank by rank only for a message. Looks become rarer,
    because each of them costs CPU time and a start with many ranks takes minutes. torch's own wait would print a
    warning per second.
    """
    keys = [f"here/{rank}" for rank in range(1, world_size)]

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys, 1) if not store.check([key])]

    wait = _BoundedWait(timeout_s)
    pause_s = _FIRST_PAUSE_S
    while keys and not store.check(keys):
        if not wait.has_time_left(missing):
            return missing()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return []


def _wait_for_answer(store: Store, *, timeout_s: int) -> None:
    """Wait for rank 0's answer in short pieces, because torch ignores Ctrl-C while it waits.

    Raises DistStoreError if there is no answer after `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return store.wait(["answer"], timedelta(seconds=_PIECE_S))
        except DistStoreError:
            if time.monotonic() >= end_s:
                raise


class _BoundedWait:
    """Time limit of a wait for other ranks. After a few seconds of waiting it prints a line with the missing ranks,
    once."""

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self._begin_s = time.monotonic()
        self._has_printed = False

    def has_time_left(self, missing: Callable[[], Sequence[int]]) -> bool:
        """Return whether time is left to wait for the missing ranks. `missing` returns these ranks, for the message."""
        waited_s = time.monotonic() - self._begin_s
        if waited_s >= SAY_AFTER_S and not self._has_printed and (ranks := missing()):
            self._has_printed = True
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            echo(
                f"txl: waiting at {address} for {format_ranks(ranks)} of {os.environ['WORLD_SIZE']}, "
                f"at most {self._timeout_s} s. {RUN_ALONE}",
                to=sys.stderr,
            )
        return waited_s < self._timeout_s


def _store(*, rank: int, world_size: int, timeout_s: int) -> TCPStore:
    """Connect to the key-value store of the job. Rank 0 creates this store. Raises ConfigError if the connection
    fails."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun made it
    is_master = rank == 0 and not has_store
    try:
        if not is_master:
            _wait_for_listener(address, port, timeout_s=timeout_s)
        return TCPStore(
            address,
            port,
            world_size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (DistNetworkError, DistStoreError, OSError) as error:
        raise ConfigError(_no_store(error, rank=rank, where=f"{address}:{port}", timeout_s=timeout_s)) from error


def _wait_for_listener(address: str, port: int, *, timeout_s: int) -> None:
    """Wait until a process listens at the address. Raises OSError after `timeout_s` seconds.

    The wait is done here because torch ignores Ctrl-C while it connects.
    """
    wait = _BoundedWait(timeout_s)
    while True:
        try:
            socket.create_connection((address, port), timeout=_PIECE_S).close()
            return
        except OSError:
            if not wait.has_time_left(lambda: [0]):
                raise
            time.sleep(0.1)


def _no_store(error: Exception, *, rank: int, where: str, timeout_s: int) -> str:
    """Return the message that says why this rank cannot reach the store."""
    if "EADDRINUSE" in str(error):
        return (
            f"{where}, where the ranks are to meet, is in use, perhaps by another job. Give this job another port with "
            "--master_port of the launcher, or with MASTER_PORT."
        )
    if rank == 0:
        return (
            f"rank 0 cannot listen at {where}: {first_line(error)}. Give --master_addr and --master_port of the "
            f"launcher. {RUN_ALONE}"
        )
    return (
        f"rank {rank} on {socket.gethostname()} found no rank 0 at {where} in {timeout_s} s. Check whether rank 0 has "
        f"started there, and whether a firewall blocks the port. {RUN_ALONE}"
    )


def verdict(here: dict[int, list[str]], missing: Sequence[int], *, timeout_s: int) -> str:
    """Return the reason why the job cannot begin, or an empty text if it can begin.

    The reasons are missing ranks, or problems of ranks. `here` contains [host, problem] of each rank that has arrived.
    """
    if missing:
        hosts: dict[str, list[int]] = {}
        for rank, (host, _) in here.items():
            hosts.setdefault(host, []).append(rank)
        came = ", ".join(f"{host} ({format_ranks(ranks)})" for host, ranks in hosts.items())
        return (
            f"{format_ranks(missing)} of {len(here) + len(missing)} did not arrive within {timeout_s} s. "
            f"Only {came} arrived. On every node that is not in this list, check whether the program has started and "
            "can reach the node of rank 0."
        )
    problems = [f"{host}, rank {rank}: {problem}" for rank, (host, problem) in here.items() if problem]
    if not problems:
        return ""
    return f"{'; '.join(problems)}. Start fewer ranks on the nodes named here."


def free_port() -> int:
    """Return a port of this machine that no process uses now, for a store that is created seconds later.

    The port lies below the range from which the kernel takes ports of outgoing connections, so that no connection takes
    it before the store is created. If that range leaves no room, the kernel chooses the port. Raises OSError if there
    is no free port or no free descriptor.
    """
    room = range(_LOWEST_PORT, min(_first_outgoing_port(), _END_OF_PORTS))
    for port in random.SystemRandom().sample(room, k=min(_MAX_PROBES, len(room))):
        with contextlib.suppress(OSError):
            return _bound_port(port)
    return _bound_port(0)


def _bound_port(port: int) -> int:
    """Return the port if it is free, or a free one for port 0. Raises OSError if it is in use."""
    with socket.socket() as probe:
        probe.bind(("", port))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    """Return the lowest port that Linux gives to outgoing connections: 32768, if the administrator has not changed it.
    On other systems the range begins higher."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:
        return 32768
