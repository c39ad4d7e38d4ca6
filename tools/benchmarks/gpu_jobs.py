"""Run the jobs of a section of `gpu.py`: each result is written as a row at once, and an error becomes a row.

A section is a function from a `Setting` to its jobs by name. The most useful jobs come first.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tools.benchmarks.gpu_rows import Journal, Row
from txl_dist.errors import first_and_last_line


class Setting(NamedTuple):
    """Options that `gpu.py` passes to each section."""

    device: str
    """`cuda`, or `cpu` in a rehearsal."""
    rehearse: bool
    """Whether to use tiny sizes, fp32 and Triton's interpreter."""
    peers: Mapping[str, Path | None]
    """Folders of the other codes, by the names `original` and `nvidia`. None where no folder was given."""
    fault: str = ""
    """`kill`, `raise` or `hang`: how the first job fails on purpose, to show what is left then. Empty for no fault."""


Job = Callable[[], Iterable[Mapping[str, object]]]
Section = Callable[[Setting], dict[str, Job]]


class Skipped(Exception):  # noqa: N818  it is not an error
    """Raised by a job that cannot run on this machine, with the reason. It is not an error of the job."""


def work(section: Section, setting: Setting, journal: Journal) -> bool:
    """Run the remaining jobs. Return False if a job has left the device in a state in which other jobs would fail."""
    jobs = section(setting)
    for name in journal.plans(jobs):
        journal.begins(name)
        try:
            if setting.fault and not journal.skip and name == next(iter(jobs)):
                break_down(setting.fault)
            for row in jobs[name]():
                journal.row(name, row)
        except Skipped as reason:
            journal.row(name, {"skipped": str(reason)})
        except Exception as error:  # noqa: BLE001  the other jobs must run after any error
            if setting.rehearse and is_of_interpreter(error):
                journal.row(name, {"skipped": "the interpreter of triton 3.6 needs numpy < 2.4"})
                journal.ends(name)
                continue
            journal.row(name, error_row(error))
            if is_spoiled(error):
                journal.ends(name)
                return False
        journal.ends(name)
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return True


def break_down(fault: str) -> None:
    """Fail on purpose: be killed, raise an error or hang."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    raise RuntimeError("on purpose")


def is_spoiled(error: BaseException) -> bool:
    """Return whether the device's context is lost. After an illegal access every later call fails."""
    words = str(error)
    return not isinstance(error, torch.OutOfMemoryError) and ("CUDA error" in words or "CUDNN_STATUS" in words)


def is_of_interpreter(error: BaseException) -> bool:
    """Return whether Triton's interpreter failed because numpy 2.4 converts only arrays without dimensions to numbers.

    On a GPU the interpreter is not used.
    """
    return "only 0-dimensional arrays can be converted to Python scalars" in str(error)


def error_row(error: BaseException) -> Row:
    """Return a row with the type of the error, and the first and the last line of its message. The log gets the whole
    traceback."""
    words = f"{type(error).__name__}: {first_and_last_line(str(error))}"
    return {"error": words, "log": "".join(traceback.format_exception(error))}
