"""How many processes a test starts: what a test costs, whatever machine it runs on.

A second on one machine is three on another, and six beside a compiler; a start is a start. Counted is every program, a
shell's or a Python's, every worker of `multiprocessing` and every process that `tests.helpers.forked` forks, by this
process; what those start themselves is not.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from multiprocessing.process import BaseProcess

import pytest

BUDGET = 8
"""Processes that a test of the default run, or a fixture of one, may start."""
SMOKE_BUDGET = 20

count = 0


def begin_to_count() -> None:
    """Count what this process starts from now on, in `count`."""
    sys.addaudithook(_see)
    begin = BaseProcess.start

    def start(process: BaseProcess) -> None:
        global count
        count += 1
        begin(process)

    BaseProcess.start = start  # type: ignore[method-assign]


def check(started: int, *, marks: Collection[str]) -> None:
    """Fail if a test with these marks may not start so many. What only `--all` runs may start what it likes."""
    if "smoke" in marks:
        budget = SMOKE_BUDGET
    elif "slow" in marks or "dist" in marks:
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
