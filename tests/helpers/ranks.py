"""Real processes for tests: a top-level worker runs once per rank over gloo, and each rank's result comes back."""

import faulthandler
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def run_ranks(worker: Callable[..., Any], *arguments: Any, world_size: int, folder: Path) -> list[Any]:
    """worker(ranks, *arguments) on `world_size` spawned processes; the results in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_enter, args=(worker, arguments, world_size, port, folder), nprocs=world_size)
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _enter(
    rank: int, worker: Callable[..., Any], arguments: tuple[Any, ...], world_size: int, port: int, folder: Path
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    faulthandler.enable()  # a crash in native code shows where it happened
    from txl_dist.dist import joined_ranks

    with joined_ranks(timeout_s=120) as ranks:
        result = worker(ranks, *arguments)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)  # see cli.run: the interpreter's teardown sometimes aborts in native threads
