"""Ranks that start in a second, and a supervisor that behaves like DeepSpeed's `launch.py`.

A rank is forked by the server of `tests.helpers.forked`. It runs the same command line as a rank of the `deepspeed`
launcher, with the environment that the launcher would set. A test checks that the losses of both are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

from tests.helpers import forked
from tests.helpers.supervised import run_supervised
from txl_dist.distributed.rendezvous import free_port

GRACE_S = 1.0
"""Seconds from the first failure of a rank to SIGTERM for the other ranks. `launch.py` checks every second."""
KILL_S = 5.0
"""Seconds from this SIGTERM to SIGKILL. `launch.py` waits 30 s."""
ANNOUNCED = re.compile(r"^TXL_FAILPOINTS (\w+) rank (\d+) step (\d+) phase (\S+) time ([\d.]+)\n", re.MULTILINE)


class Struck(NamedTuple):
    """A fault of TXL_FAILPOINTS that occurred."""

    kind: str
    rank: int
    step: int
    phase: str
    time_s: float
    """Time of the fault in seconds since 1970."""


class Job:
    """One start of a run: its ranks, their exits, and their common log. Leaving the context kills the ranks that still
    run."""

    def __init__(
        self, *words: str, log: Path, ranks: int = 2, fault: str = "", cwd: Path | None = None, nodes: int = 1
    ) -> None:
        """Start `txl WORDS` on `ranks` ranks. Their output is appended to `log`. More than one node is pretended."""
        self.log, self.started_s = log, time.time()
        log.touch()
        self._log_start = self._scanned = log.stat().st_size
        self._log_end = 0
        self._struck: list[Struck] = []
        self.exits: dict[int, tuple[int, float]] = {}
        """(exit code, seconds since 1970) of each rank that has ended. The exit code is negative for a signal."""
        self._lost: set[int] = set()
        self._failed_s = self._termed_s = 0.0
        self._port, self.leaked_bytes = str(free_port()), 0
        self._processes = []
        for rank in range(ranks):
            place = forked.place_on_node(rank, ranks, self._port, num_nodes=nodes)
            variables = forked.environment(**place, TXL_FAILPOINTS=fault)
            program = run_supervised if "--recover.spares" in words else forked.run_txl
            self._processes.append(forked.start(program, *words, variables=variables, cwd=cwd, out=log))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join(30)
        self._log_end = self.log.stat().st_size
        # DeepSpeed's buffers in shared memory. The engine should unlink them as soon as all ranks have mapped them.
        for leaked in Path("/dev/shm").glob(f"deepspeed_*_{self._port}_*"):
            self.leaked_bytes += leaked.stat().st_size
            leaked.unlink()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    @property
    def codes(self) -> list[int]:
        """Exit codes in the order of the ranks, negative for a signal. All ranks must have ended."""
        return [self.exits[rank][0] for rank in range(len(self._processes))]

    @property
    def text(self) -> str:
        """Output of the ranks of this start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read(self._log_end - self._log_start if self._log_end else -1).decode(errors="replace")

    @property
    def struck(self) -> list[Struck]:
        """Faults of TXL_FAILPOINTS that occurred, in order. Only new lines of the log are read."""
        with self.log.open("rb") as file:
            file.seek(self._scanned)
            whole, _, _ = file.read().rpartition(b"\n")
        self._scanned += len(whole)
        for kind, rank, step, phase, at in ANNOUNCED.findall(whole.decode(errors="replace") + "\n"):
            self._struck.append(Struck(kind, int(rank), int(step), phase, float(at)))
        return self._struck

    def signal(self, number: int, *, rank: int | None = None) -> float:
        """Send a signal to one rank, or to all running ranks. Return the time in seconds since 1970."""
        for this, process in enumerate(self._processes):
            if rank in (None, this) and this not in self.exits:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number)
        return time.time()

    def lose_node(self, *ranks: int) -> None:
        """Let the launcher not notice the end of these ranks."""
        self._lost |= set(ranks)

    def kill_node(self, *ranks: int) -> None:
        """End all processes of these ranks at once, as if their node had lost power. The launcher does not notice."""
        self.lose_node(*ranks)
        doomed = []
        for rank in ranks:
            agent = psutil.Process(self._processes[rank].pid)
            doomed += [agent, *agent.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_for(self, condition: Callable[[], bool], *, limit_s: float = 60) -> float:
        """Supervise the ranks until the condition is true, and return the time in seconds since 1970. Raises
        AssertionError if the job ends before."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if not self._watch():
                assert condition(), f"the job ended with {self.codes} before that:\n{self.text[-3000:]}"
            assert time.monotonic() < end_s, f"nothing within {limit_s} s:\n{self.text[-3000:]}"
        return time.time()

    def wait(self, *, limit_s: float = 120) -> list[int]:
        """Supervise the ranks until all have ended, and return the exit codes."""
        end_s = time.monotonic() + limit_s
        while self._watch():
            assert time.monotonic() < end_s, f"still running after {limit_s} s:\n{self.text[-3000:]}"
        return self.codes

    def _watch(self) -> bool:
        """Record the ranks that have ended, and signal the others as the launcher does. Return whether any rank still
        runs."""
        living = {process.sentinel: rank for rank, process in enumerate(self._processes) if rank not in self.exits}
        for sentinel in connection.wait(list(living), timeout=0.01) if living else []:
            rank = living[sentinel]  # type: ignore[index]
            self._processes[rank].join()
            code, now_s = self._processes[rank].exitcode, time.time()
            assert code is not None
            self.exits[rank] = (code, now_s)
            if code != 0 and not self._failed_s and rank not in self._lost:
                self._failed_s = now_s
        now_s = time.time()
        if self._failed_s and not self._termed_s and now_s > self._failed_s + GRACE_S:
            self._termed_s = self.signal(signal.SIGTERM)
        if self._termed_s and now_s > self._termed_s + KILL_S:
            self.signal(signal.SIGKILL)
        return len(self.exits) < len(self._processes)
