"""Faults on purpose, for tests of reliability: the one place that reads TXL_FAULT. Unset, nothing here does anything.

    TXL_FAULT=kind:rank:step[:phase[#n]][,kind:rank:step[:phase[#n]] ...]

The program calls `failpoint(phase, step=...)` where something may go wrong; the n-th time (the first, unless told
otherwise) that this process's rank, step and phase match an entry, that fault happens there, once. Rank, step and phase
may be `*`; without a phase an entry means `step`, the beginning of a training step. Each fault announces itself on
stderr with the time, so that a log shows which misfortunes were ordered. Kinds:

    kill     SIGKILL to this process            stop     SIGSTOP to this process
    term     SIGTERM to this process            raise    an exception that nobody expects
    hang     sleep for ever                     spin     hold the interpreter lock for ever
    enospc   OSError: no space left on device   eio      OSError: input/output error
    slow     sleep for 2 s                      trace    only announced, every time: lists the points that there are
    nan, inf, spike, skip, flip                 returned, for the caller to act on
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from functools import cache
from typing import NamedTuple

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
ACTED_ON_BY_CALLER = ("nan", "inf", "spike", "skip", "flip")
KINDS = (*SIGNALS, *ERRORS, *ACTED_ON_BY_CALLER, "raise", "hang", "spin", "slow", "trace")


class Fault(NamedTuple):
    """One entry of TXL_FAULT; rank, step and phase as written, `*` matching any."""

    kind: str
    rank: str
    step: str
    phase: str = "step"
    nth: int = 1
    """How many matches from now it strikes."""

    def matches(self, *, step: int, phase: str) -> bool:
        """Whether it is ordered for this rank at this point."""
        here = ((self.rank, os.environ.get("RANK", "0")), (self.step, str(step)), (self.phase, phase))
        return all(wanted in ("*", found) for wanted, found in here)


def failpoint(phase: str, *, step: int) -> str:
    """Let the fault that is ordered for this rank, step and phase happen.

    Returns the kind where the caller has to act on it, else "". Raises OSError or RuntimeError where that is the fault,
    and ValueError for a TXL_FAULT that cannot be read.
    """
    faults = _ordered()
    for index, fault in enumerate(faults):
        if not fault.matches(step=step, phase=phase):
            continue
        if fault.kind == "trace":
            _announce(fault, step=step, phase=phase)
        elif fault.nth > 1:
            faults[index] = fault._replace(nth=fault.nth - 1)
        else:
            del faults[index]
            _announce(fault, step=step, phase=phase)
            return _strike(fault.kind)
    return ""


def parse_faults(text: str) -> list[Fault]:
    """The entries of TXL_FAULT. Raises ValueError for one that is none."""
    faults = []
    for entry in filter(None, text.split(",")):
        kind, *where = entry.split(":")
        if (
            kind not in KINDS
            or not 2 <= len(where) <= 3
            or not all(word == "*" or word.isdigit() for word in where[:2])
        ):
            raise ValueError(
                f"TXL_FAULT: {entry!r} is not kind:rank:step[:phase[#n]] with a kind of {', '.join(KINDS)}."
            )
        phase, _, nth = where[2].partition("#") if len(where) == 3 else ("step", "", "")
        faults.append(Fault(kind, where[0], where[1], phase, int(nth or 1)))
    return faults


@cache
def _ordered() -> list[Fault]:
    """What is still to happen in this process; read at the first point, so that a forked rank has orders of its own."""
    return parse_faults(os.environ.get("TXL_FAULT", ""))


def _announce(fault: Fault, *, step: int, phase: str) -> None:
    rank = os.environ.get("RANK", "0")
    line = f"TXL_FAULT {fault.kind} rank {rank} step {step} phase {phase} time {time.time():.3f}\n"
    os.write(2, line.encode())  # at once, and in one piece


def _strike(kind: str) -> str:
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRORS:
        raise OSError(ERRORS[kind], f"{os.strerror(ERRORS[kind])} (ordered by TXL_FAULT)")
    elif kind == "raise":
        raise RuntimeError("ordered by TXL_FAULT")
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "spin":
        _hold_the_interpreter()
    elif kind == "slow":
        time.sleep(2)
    return kind if kind in ACTED_ON_BY_CALLER else ""


def _hold_the_interpreter() -> None:
    """Wait for ever for a lock in C (zeros are an open one), keeping the interpreter's; no signal ends that."""
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
