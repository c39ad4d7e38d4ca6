"""How a section of `gpu.py` goes through its jobs: what they find is noted row by row, what they raise is a row.

A section is a function from a `Setting` to its jobs by name, in the order in which they are most worth having.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tools.benchmarks.gpu_rows import Journal


class Setting(NamedTuple):
    """What the sections are told."""

    device: str
    """cuda, or in a rehearsal cpu"""
    rehearse: bool
    """Everything tiny; fp32; Triton's interpreter."""
    peers: Mapping[str, Path | None]
    """`original` and `nvidia`: the folders with their code, where given."""
    fault: str = ""
    """kill, raise or hang: what the first job is to do, to see what is left then."""


Job = Callable[[], Iterable[Mapping[str, object]]]
Section = Callable[[Setting], dict[str, Job]]


class Skipped(Exception):  # noqa: N818  it is none
    """A job that cannot be done here, and why; no error."""


def work(section: Section, setting: Setting, journal: Journal) -> bool:
    """Go through the jobs that are left. False: one has left the device in a state in which others would fail."""
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
        except Exception as error:  # noqa: BLE001  of whatever kind, the others are to be done
            journal.row(name, {"error": first_line(error)})
            if is_spoiled(error):
                journal.ends(name)
                return False
        journal.ends(name)
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    return True


def break_down(fault: str) -> None:
    """Be killed, raise or hang."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    raise RuntimeError("on purpose")


def is_spoiled(error: BaseException) -> bool:
    """Whether the device's context is lost: after an illegal access every later call fails."""
    words = str(error)
    return not isinstance(error, torch.OutOfMemoryError) and ("CUDA error" in words or "CUDNN_STATUS" in words)


def first_line(error: BaseException) -> str:
    """Kind and message, short."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
