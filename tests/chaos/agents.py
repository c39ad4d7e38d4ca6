"""Agents, ranks and spares of a job with recovery, from outside: their processes, and the records of recoveries."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.lab import Case
from tests.chaos.runs import Run
from tests.helpers.job import Job
from txl_dist.distributed.recovery.status import Status, StatusPage

ON = ("--recover.spares", "1")
STRUCK_AT = 10
"""Step in which faults strike that may come in any step."""
GONE_S = 5.0
"""Seconds after the end of a job in which all its processes must have ended."""


def running_ranks(job: Job) -> list[int]:
    """All ranks that run, replacements included: children of agents, and children of the spare."""
    pids = []
    for agent in job.pids:
        for child in children_of(agent):
            pids += sorted(children_of(child)) or [child]
    return pids


def processes_of(job: Job, *ranks: int) -> list[psutil.Process]:
    """The agents of these ranks, or of all, and all processes that they have started."""
    found = []
    for agent in [job.pids[rank] for rank in ranks] or job.pids:
        with suppress(psutil.Error):
            found += [psutil.Process(agent), *psutil.Process(agent).children(recursive=True)]
    return found


def process_named(job: Job, name: str) -> psutil.Process | None:
    """The process of a job with this name, for instance txl-rank-1 or txl-spare."""
    for process in processes_of(job):
        with suppress(OSError):
            if _name_of(process) == name:
                return process
    return None


def status_of(job: Job, rank: int) -> Status:
    """The status page of a rank, as its agent reads it."""
    files = Path(f"/proc/{job.pids[rank]}/fd").iterdir()
    return StatusPage(str(next(path for path in files if os.readlink(path).startswith("/memfd:txl_status")))).read()


def note_left(case: Case, run: Run) -> None:
    """Note a problem if processes of jobs that have ended are left. Their output goes to the log of the run."""
    end_s = time.monotonic() + GONE_S
    while (left := _writers_of(run.log)) and time.monotonic() < end_s:
        time.sleep(0.1)
    if left:
        case.problems.append(f"the processes {left} are left")


def _writers_of(log: Path) -> list[int]:
    pids = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                pids.append(process.pid)
    return pids


def names_of(job: Job) -> list[str]:
    """Sorted names of the processes that agents have started, as `pgrep -x` finds them."""
    names = []
    for agent in job.pids:
        with suppress(psutil.Error, OSError):
            for process in psutil.Process(agent).children(recursive=True):
                names.append(_name_of(process))
    return sorted(names)


def _name_of(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="ascii").strip()


def children_of(pid: int) -> set[int]:
    """The children of a process, or none if it has ended."""
    with suppress(OSError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()}
    return set()


def judge_events(case: Case, run: Run, *, copy_every: int = 1, most: int | None = None) -> list[int]:
    """Fill the figures of a case. Returns the ranks that were replaced, one per loss.

    At most the step in flight and those since the last copies may be made again, or `most` steps.
    """
    most = copy_every + 1 if most is None else copy_every - 1 + most
    events = [record for record in run.records("event") if record["event"] == "recovered"]
    if not events:
        case.problems.append("no event says that the job has recovered")
    if any(event["restored_from"] == "copies" and event["repeated_steps"] > most for event in events):
        case.problems.append(f"more than {most} steps were made again: {events}")
    for name in ("notice_s", "regroup_s", "restore_s", "redo_s"):
        case.figures[name] = max((event[name] for event in events), default=0.0)
    return [rank for event in events for rank in event["ranks"]]
