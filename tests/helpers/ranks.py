"""Real processes for tests: a top-level worker runs once per rank over gloo, and the result of each rank is
returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.helpers import forked
from txl_dist.distributed.rendezvous import free_port


def run_ranks(worker: Callable[..., Any], *arguments: Any, world_size: int, folder: Path) -> list[Any]:
    """Run worker(ranks, *arguments) in `world_size` processes, and return the results in the order of the ranks.

    The processes are forked, which is fast. If GPUs can be used, each process is a new one, because CUDA does not work
    after a fork.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, processes = free_port(), []
    for rank in range(world_size):
        variables = forked.environment(**forked.place(rank, world_size, port))
        call = (worker, arguments, folder / f"result-{rank}")
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            processes.append(forked.start(_work, *call, variables=variables))
        else:
            del variables["DS_ACCELERATOR"]
            processes.append(multiprocessing.get_context("spawn").Process(target=_spawned, args=(variables, *call)))
            processes[-1].start()
    try:
        living = {process.sentinel: process for process in processes}
        while living:  # a failed rank ends the others, because they would wait for it
            for sentinel in connection.wait(list(living)):
                process = living.pop(sentinel)
                process.join()
                if process.exitcode:
                    rank = processes.index(process)
                    path = folder / f"error-{rank}"
                    said = path.read_text(encoding="utf-8") if path.exists() else f"exit code {process.exitcode}"
                    raise AssertionError(f"rank {rank} failed:\n{said}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _spawned(variables: dict[str, str], *call: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    _work(*call)


def _work(worker: Callable[..., Any], arguments: tuple[Any, ...], path: Path) -> None:
    faulthandler.enable()  # a crash in native code shows where it happened
    from txl_dist.distributed.collectives import distributed_context

    try:
        with distributed_context(timeout_s=120) as ranks:
            result = worker(ranks, *arguments)
    except BaseException:  # noqa: BLE001  every error is reported
        path.with_name(path.name.replace("result", "error")).write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    path.write_bytes(pickle.dumps(result))
    os._exit(0)  # see cli.run: the interpreter's teardown sometimes aborts in native threads
