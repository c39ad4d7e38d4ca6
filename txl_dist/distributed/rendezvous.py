"""How the ranks of a job meet, within a bounded time, and who is named when they do not.

    a store       at MASTER_ADDR:MASTER_PORT, held by rank 0 or by torchrun
    a roll call   rank 0 counts who has come and tells all of them who has not, or who cannot take part

Every wait has a limit, so a node that does not come ends in a message on those that did, and not in silence.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from txl_dist.console.echo import echo
from txl_dist.distributed.rank_environment import RUN_ALONE, format_ranks
from txl_dist.errors import ConfigError

NO_ANSWER_S = 30
"""How much longer than the others rank 0 may take to say who has come."""
SAY_AFTER_S = 3.0
"""Seconds of waiting after which a message says for which ranks."""
_PIECE_S = 1.0
"""Seconds of one wait, during which torch reacts to no signal."""


def rendezvous(*, rank: int, world_size: int, problem: str, timeout_s: int) -> Store:
    """Wait for all ranks; a store that they share. `problem`: why this rank cannot take part, empty if it can.

    Raises ConfigError, on every rank that came, if one has not come after `timeout_s` or has a problem.
    """
    store = _store(rank=rank, world_size=world_size, timeout_s=timeout_s)
    store.set(f"here/{rank}", json.dumps([socket.gethostname(), problem]))
    if rank == 0:
        missing = list(range(1, world_size))
        waiting = _Waiting(timeout_s)
        while (missing := [r for r in missing if not store.check([f"here/{r}"])]) and waiting.goes_on(missing):
            time.sleep(0.1)
        here = {r: json.loads(store.get(f"here/{r}")) for r in range(world_size) if r not in missing}
        store.set("answer", verdict(here, missing, timeout_s=timeout_s))
    try:
        _wait_for_answer(store, timeout_s=timeout_s + NO_ANSWER_S)
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


def _wait_for_answer(store: Store, *, timeout_s: int) -> None:
    """Wait in short pieces: torch hears no Ctrl-C while it waits. Raises DistStoreError after the last one."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return store.wait(["answer"], timedelta(seconds=_PIECE_S))
        except DistStoreError:
            if time.monotonic() >= end_s:
                raise


class _Waiting:
    """A wait with a limit that says once, after a few seconds, for whom it is."""

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s, self._begin_s, self._is_said = timeout_s, time.monotonic(), False

    def goes_on(self, missing: Sequence[int]) -> bool:
        """Return whether there is time left."""
        waited_s = time.monotonic() - self._begin_s
        if waited_s >= SAY_AFTER_S and not self._is_said:
            self._is_said = True
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            echo(
                f"txl: waiting at {address} for rank {format_ranks(missing)} of {os.environ['WORLD_SIZE']}, "
                f"at most {self._timeout_s} s. {RUN_ALONE}",
                to=sys.stderr,
            )
        return waited_s < self._timeout_s


def _store(*, rank: int, world_size: int, timeout_s: int) -> TCPStore:
    """Connect to the store, or make it. Raises ConfigError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
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
    """Wait until somebody listens there: torch hears no Ctrl-C while it connects. Raises OSError."""
    waiting = _Waiting(timeout_s)
    while True:
        try:
            socket.create_connection((address, port), timeout=_PIECE_S).close()
            return
        except OSError:
            if not waiting.goes_on([0]):
                raise
            time.sleep(0.1)


def _no_store(error: Exception, *, rank: int, where: str, timeout_s: int) -> str:
    """Return why this rank cannot reach the others."""
    if "EADDRINUSE" in str(error):
        return (
            f"{where}, where the ranks are to meet, is in use, by another job perhaps. Give this one another port: "
            "--master_port of the launcher, or MASTER_PORT."
        )
    if rank == 0:
        return (
            f"rank 0 cannot listen at {where}: {first_line(error)}. Give --master_addr and --master_port of the "
            f"launcher. {RUN_ALONE}"
        )
    return (
        f"rank {rank} on {socket.gethostname()} found no rank 0 at {where} in {timeout_s} s. See whether it has "
        f"started there, and whether a firewall is between. {RUN_ALONE}"
    )


def verdict(here: dict[int, list[str]], missing: Sequence[int], *, timeout_s: int) -> str:
    """What is wrong with those who came ([host, problem] by rank), or with who did not; empty if nothing."""
    if missing:
        hosts: dict[str, list[int]] = {}
        for rank, (host, _) in here.items():
            hosts.setdefault(host, []).append(rank)
        came = ", ".join(f"{host} (rank {format_ranks(ranks)})" for host, ranks in hosts.items())
        return (
            f"rank {format_ranks(missing)} of {len(here) + len(missing)} did not come in {timeout_s} s; "
            f"here are {came}. See on the nodes that are not in this list whether the program started and reaches this "
            "one."
        )
    problems = [f"{host}, rank {rank}: {problem}" for rank, (host, problem) in here.items() if problem]
    return f"{'; '.join(problems)}. Start fewer ranks on that node." if problems else ""


def free_port() -> int:
    """One of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def first_line(error: Exception) -> str:
    """Of what torch says, which goes on with a stack."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
