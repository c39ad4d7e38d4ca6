"""How the ranks of a job meet, within a bounded time, and who is named when they do not.

    a store       at MASTER_ADDR:MASTER_PORT, held by rank 0 or by torchrun
    a roll call   rank 0 counts who has come and tells all of them who has not, or who cannot take part

Every wait has a limit, so a node that does not come ends in a message on those that did, and not in silence.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from txl_dist.errors import ConfigError

NO_ANSWER_S = 30
"""How much longer than the others rank 0 may take to say who has come."""


def meet(*, rank: int, world_size: int, problem: str, timeout_s: int) -> Store:
    """Wait for all ranks; a store that they share. `problem`: why this rank cannot take part, empty if it can.

    Raises ConfigError, on every rank that came, if one has not come after `timeout_s` or has a problem.
    """
    store = _store(rank=rank, world_size=world_size, timeout_s=timeout_s)
    store.set(f"here/{rank}", json.dumps([socket.gethostname(), problem]))
    if rank == 0:
        end_s, missing = time.monotonic() + timeout_s, list(range(1, world_size))
        while (missing := [r for r in missing if not store.check([f"here/{r}"])]) and time.monotonic() < end_s:
            time.sleep(0.1)
        here = {r: json.loads(store.get(f"here/{r}")) for r in range(world_size) if r not in missing}
        store.set("answer", verdict(here, missing, timeout_s=timeout_s))
    try:
        store.wait(["answer"], timedelta(seconds=timeout_s + NO_ANSWER_S))
        answer = store.get("answer").decode()
    except (DistNetworkError, DistStoreError) as error:
        raise ConfigError(f"rank 0 came and then fell silent: {first_line(error)}. See what it printed.") from error
    if answer:
        # Rank 0, which holds the store, leaves when all have read the answer.
        store.add("read", 1)
        end_s = time.monotonic() + 5
        while rank == 0 and store.add("read", 0) < len(here) and time.monotonic() < end_s:
            time.sleep(0.05)
        raise ConfigError(answer)
    return store


def _store(*, rank: int, world_size: int, timeout_s: int) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
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
    except (DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            message = (
                f"{address}:{port}, where the ranks are to meet, is in use, by another job perhaps. Give this one "
                "another port: --master_port of the launcher, or MASTER_PORT."
            )
        elif rank == 0:
            message = (
                f"rank 0 cannot listen at {address}:{port}: {first_line(error)}. Give --master_addr and --master_port "
                "of the launcher."
            )
        else:
            message = (
                f"rank {rank} on {socket.gethostname()} found no rank 0 at {address}:{port} in {timeout_s} s. See "
                "whether it has started there, and whether a firewall is between."
            )
        raise ConfigError(message) from error


def verdict(here: dict[int, list[str]], missing: Sequence[int], *, timeout_s: int) -> str:
    """What is wrong with those who came ([host, problem] by rank), or with who did not; empty if nothing."""
    if missing:
        hosts: dict[str, list[int]] = {}
        for rank, (host, _) in here.items():
            hosts.setdefault(host, []).append(rank)
        came = ", ".join(f"{host} (rank {_ranges(ranks)})" for host, ranks in hosts.items())
        return (
            f"rank {_ranges(missing)} of {len(here) + len(missing)} did not come in {timeout_s} s; here are {came}. "
            "See on the nodes that are not in this list whether the program started and reaches this one."
        )
    problems = [f"{host}, rank {rank}: {problem}" for rank, (host, problem) in here.items() if problem]
    return f"{'; '.join(problems)}. Start fewer ranks on that node." if problems else ""


def _ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def free_port() -> int:
    """One of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def first_line(error: Exception) -> str:
    """Of what torch says, which goes on with a stack."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
