"""Processes that start at once: forked by a server that has imported torch, DeepSpeed and the training code once.

    this process --> server (everything imported, one thread, no process group) --fork--> rank 0, rank 1, `txl evaluate`

A new process takes four seconds for its imports. A forked process runs the same code in the environment that a launcher
would set. tests/chaos checks that its runs equal those of the real launcher bit for bit. The server is the forkserver
of the standard library. Each pytest process has its own server, which ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
WARM = "tests.helpers.warm"
OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Environment variables of every process that a test starts."""


def environment(**variables: object) -> dict[str, str]:
    """Return this process's environment without variables of a distributed job, with ENVIRONMENT and `variables`."""
    own = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    return own | ENVIRONMENT | {name: str(value) for name, value in variables.items()}


def place(rank: int, world_size: int, port: int | str) -> dict[str, object]:
    """Return the variables with which a launcher on this machine sets the rank of a process."""
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    return who | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def place_on_node(rank: int, world_size: int, port: int | str, *, num_nodes: int) -> dict[str, object]:
    """Return the variables with which launchers on several nodes set the rank of a process. The nodes are pretended:
    all of them are this machine."""
    local_size = world_size // num_nodes
    local = {"LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size, "TXL_NODE": f"node{rank // local_size}"}
    return place(rank, world_size, port) | local


def start(
    function: Callable[..., object],
    *arguments: Any,
    variables: Mapping[str, str],
    cwd: Path | None = None,
    stdin: Path = Path(os.devnull),
    out: Path | None = None,
    err: Path | None = None,
) -> ForkServerProcess:
    """Call `function` in a process that has exactly this environment. Output is appended to `out` and `err`."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([WARM])
    with mock.patch.dict(os.environ, environment(), clear=True):
        forkserver.ensure_running()
    process = multiprocessing.get_context("forkserver").Process(
        target=_enter, args=(function, arguments, dict(variables), cwd or Path.cwd(), stdin, out, err or out)
    )
    process.start()
    return process


def run_txl(*words: str) -> None:
    """Run `python -m txl_dist WORDS`. Pass this function to `start`."""
    multiprocessing.set_start_method("fork", force=True)  # the default of a process that was not forked by a server
    sys.argv = ["txl", *words]
    from txl_dist.cli.main import run_and_exit

    run_and_exit()


def run_python(*words: str) -> None:
    """Run `python WORDS`, a program, `-m` and a module, `-c` and a text, or `-` for a text on standard input, in a
    process that has imported torch. Pass this function to `start`."""
    multiprocessing.set_start_method("fork", force=True)  # as in run_txl
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, os.getcwd() if words[0].startswith("-") else str(Path(words[0]).parent))
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] in ("-c", "-"):
        text, more = (words[1], words[2:]) if words[0] == "-c" else (sys.stdin.read(), words[1:])
        sys.argv = [words[0], *more]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [*words]
        runpy.run_path(words[0], run_name="__main__")


def run_python_as(program: str, *words: str) -> None:
    """Run `python WORDS` as `run_python` does. The Python processes that it starts itself are started by `program`."""
    sys.executable = program
    run_python(*words)


def _enter(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    variables: dict[str, str],
    cwd: Path,
    *files: Path | None,
) -> None:
    assert WARM in sys.modules, f"the server could not import {WARM}"
    os.chdir(cwd)
    for descriptor, path in enumerate(files):
        if path is not None:
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has closed it
    os.environ.clear()
    os.environ.update(variables)
    function(*arguments)
