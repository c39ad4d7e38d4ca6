"""Count the processes that a test starts. This number measures the cost of a test independently of the machine.

Times differ between machines and with other load, but the number of started processes does not. The count contains the
programs, the workers of `multiprocessing` and the processes of `tests.helpers.forked` that this process starts. It does
not contain the processes that those start.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from multiprocessing.process import BaseProcess

import pytest

BUDGET = 8
"""Largest number of processes that a test of the default run, or one of its fixtures, may start."""
SMOKE_BUDGET = 20
UNLIMITED = frozenset(("slow", "dist", "gpu"))
"""Marks of tests that may start any number of processes."""

count = 0


def begin_to_count() -> None:
    """Count the processes that this process starts from now on, in `count`."""
    sys.addaudithook(_see)
    begin = BaseProcess.start

    def start(process: BaseProcess) -> None:
        global count
        count += 1
        begin(process)

    BaseProcess.start = start  # type: ignore[method-assign]


def check(started: int, *, marks: Collection[str]) -> None:
    """Fail if a test with these marks has started too many processes.

    Tests that only `--all` runs have no limit. Tests on a GPU have no limit either, because Triton starts two compilers
    for each kernel.
    """
    if "smoke" in marks:
        budget = SMOKE_BUDGET
    elif not UNLIMITED.isdisjoint(marks):
        return
    else:
        budget = BUDGET
    if started > budget:
        pytest.fail(
            f"{started} processes were started where a test of the default run may start {budget}. Start fewer, or "
            "mark it slow: then it runs with --all.",
            pytrace=False,
        )


def _see(event: str, arguments: tuple[object, ...]) -> None:
    global count
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system"):
        count += 1
