"""How many processes a test starts: what a test costs, whatever machine it runs on.

A second on one machine is three on another, and six beside a compiler; a start is a start. Counted is every program, a
shell's or a Python's, every worker of `multiprocessing` and every rank that `tests.helpers.forked` forks, by this
process; what those start themselves is not.
"""

from __future__ import annotations

import sys
from multiprocessing.process import BaseProcess

BUDGETS = {"smoke": 30, "dist": 0, "slow": 0, "": 8}
"""Processes that one test may start, by its first of these marks: as much as
`bash launch/test.sh` can afford.
Of tests that only `--all` runs nothing is asked."""
FIXTURE_BUDGET = 4
"""Of a fixture that several tests share."""

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


def _see(event: str, arguments: tuple[object, ...]) -> None:
    global count
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system"):
        count += 1
