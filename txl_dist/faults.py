"""Faults on purpose, for tests of reliability: the one place that reads TXL_FAULT. Unset, nothing here does anything.

    TXL_FAULT=kind:rank:step[:phase][,kind:rank:step[:phase] ...]

`rank` may be `*`. The program calls `fault_point(phase, step=...)` where something may go wrong; the first time that
rank, step and phase match an entry, that fault happens there. Kinds:

    kill     SIGKILL to this process            stop     SIGSTOP to this process
    term     SIGTERM to this process            raise    an exception that nobody expects
    hang     sleep for ever                     spin     hold the interpreter lock for ever
    enospc   OSError: no space left on device   eio      OSError: input/output error
    slow     sleep for 2 s                      nan, inf, spike, skip, flip    returned, for the caller to act on
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from typing import NamedTuple

ACTED_ON_BY_CALLER = ("nan", "inf", "spike", "skip", "flip")


class Fault(NamedTuple):
    """One entry of TXL_FAULT."""

    kind: str
    rank: str
    step: int
    phase: str


def fault_point(phase: str, *, step: int) -> str:
    """Let the fault that is ordered for this rank, step and phase happen; an entry without a phase means `step`.

    Returns the kind where the caller has to act on it, else "". Raises OSError or RuntimeError where that is the fault.
    """
    if not _ordered:
        return ""
    rank = os.environ.get("RANK", "0")
    for fault in _ordered:
        if fault.phase == phase and fault.step == step and fault.rank in ("*", rank):
            _ordered.remove(fault)
            return _strike(fault)
    return ""


def parse_faults(text: str) -> list[Fault]:
    """The entries of TXL_FAULT. Raises ValueError for one that is none."""
    faults = []
    for entry in filter(None, text.split(",")):
        kind, rank, step, *phase = entry.split(":", 3)
        faults.append(Fault(kind, rank, int(step), phase[0] if phase else "step"))
    return faults


def _strike(fault: Fault) -> str:
    kind = fault.kind
    if kind in ("kill", "stop", "term"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "spin":
        ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter lock
    elif kind in ("enospc", "eio"):
        number = errno.ENOSPC if kind == "enospc" else errno.EIO
        raise OSError(number, f"{os.strerror(number)} (ordered by TXL_FAULT)")
    elif kind == "slow":
        time.sleep(2)
    elif kind == "raise":
        raise RuntimeError("ordered by TXL_FAULT")
    return kind if kind in ACTED_ON_BY_CALLER else ""


_ordered = parse_faults(os.environ.get("TXL_FAULT", ""))
