"""Injected faults for tests of reliability. The environment variable TXL_FAILPOINTS says which faults happen.

    TXL_FAILPOINTS=kind:rank:step[:phase[#n][@generation]][,kind:rank:step[:phase[#n][@generation]] ...]

The program calls `failpoint(phase, step=...)` at places that may fail. The phase is the name of the place. When rank,
step and phase of this process match an entry for the n-th time (by default the first), the entry's fault happens there,
once. Without the variable no fault happens. Rank, step, phase and generation may be `*`. The default phase is `step`,
the beginning of a training step. The generation is 1 until a lost rank is replaced (`distributed/recovery`), which is
the default. Each fault is announced on stderr with the time, so that a log shows which faults were injected.
Kinds:

    kill     SIGKILL to this process            stop     SIGSTOP to this process
    term     SIGTERM to this process            raise    RuntimeError, which no code expects
    hang     sleep for ever                     spin     hold the interpreter lock for ever
    enospc   OSError: no space left on device   eio      OSError: input/output error
    slow     sleep for 2 s                      trace    every match is announced, nothing else happens
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
"""Signal that the process sends to itself, for each of these kinds of faults."""
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
"""Error number of the OSError that is raised for each of these kinds of faults."""
ACTED_ON_BY_CALLER = ("nan", "inf", "spike", "skip", "flip")
"""Kinds of faults that `failpoint` returns. The caller then causes the fault, for instance a loss of NaN."""
KINDS = (*SIGNALS, *ERRORS, *ACTED_ON_BY_CALLER, "raise", "hang", "spin", "slow", "trace")
"""All kinds of faults that TXL_FAILPOINTS may name."""


class Fault(NamedTuple):
    """One entry of TXL_FAILPOINTS. Rank, step and phase are stored as written, where `*` matches any value."""

    kind: str
    rank: str
    step: str
    phase: str = "step"
    nth: int = 1
    """Number of matches until the fault happens. 1 means the next match."""
    generation: str = "1"

    def matches(self, *, step: int, phase: str) -> bool:
        """Return True if the entry's rank, step and phase match this process, the step and the phase."""
        rank = os.environ.get("RANK", "0")
        is_rank = self.rank in ("*", rank)
        is_step = self.step in ("*", str(step))
        is_phase = self.phase in ("*", phase)
        is_generation = self.generation in ("*", os.environ.get("TXL_GENERATION", "1"))
        return is_rank and is_step and is_phase and is_generation


def failpoint(phase: str, *, step: int) -> str:
    """Cause the fault that TXL_FAILPOINTS injects for this rank, step and phase, if any.

    Returns the kind of a fault that the caller must cause, else "". For some kinds of faults this function raises an
    OSError or a RuntimeError. Raises ValueError if TXL_FAILPOINTS cannot be parsed.
    """
    faults = _pending_faults()
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
            return _inject(fault.kind)
    return ""


def parse_faults(text: str) -> list[Fault]:
    """Return the faults that the value of TXL_FAILPOINTS lists. Raises ValueError if an entry is wrong. The message
    names the entry."""
    faults = []
    for entry in filter(None, text.split(",")):
        kind, *where = entry.split(":")
        has_numbers = all(_is_number_or_any(word) for word in where[:2])
        is_valid = kind in KINDS and 2 <= len(where) <= 3 and has_numbers
        if not is_valid:
            raise ValueError(
                f"TXL_FAILPOINTS: {entry!r} is not KIND:RANK:STEP[:PHASE[#N][@GENERATION]]. "
                f"KIND is one of {', '.join(KINDS)}. "
                "PHASE is the name of a failpoint. The fault happens at the N-th match, by default at the first."
            )
        rank, step = where[:2]
        phase = "step"
        nth = ""
        generation = ""
        if len(where) == 3:
            phase, _, generation = where[2].partition("@")
            phase, _, nth = phase.partition("#")
        faults.append(Fault(kind, rank, step, phase, int(nth or 1), generation or "1"))
    return faults


def _is_number_or_any(word: str) -> bool:
    """Return True if a word is a whole number or `*`."""
    return word == "*" or word.isdigit()


@cache
def _pending_faults() -> list[Fault]:
    """Return the faults that may still happen in this process. `failpoint` changes this list.

    TXL_FAILPOINTS is read at the first failpoint, so that a forked rank reads its own list.
    """
    return parse_faults(os.environ.get("TXL_FAILPOINTS", ""))


def _announce(fault: Fault, *, step: int, phase: str) -> None:
    """Write one line about a fault to stderr, directly and without a buffer."""
    rank = os.environ.get("RANK", "0")
    line = f"TXL_FAILPOINTS {fault.kind} rank {rank} step {step} phase {phase} time {time.time():.3f}\n"
    os.write(2, line.encode())


def _inject(kind: str) -> str:
    """Cause a fault of this kind. Returns the kind if the caller must cause the fault, else ""."""
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind in ERRORS:
        raise OSError(ERRORS[kind], f"{os.strerror(ERRORS[kind])} (ordered by TXL_FAILPOINTS)")
    elif kind == "raise":
        raise RuntimeError("ordered by TXL_FAILPOINTS")
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "spin":
        _hold_the_interpreter()
    elif kind == "slow":
        time.sleep(2)
    if kind in ACTED_ON_BY_CALLER:
        return kind
    return ""


def _hold_the_interpreter() -> None:
    """Block for ever in C while holding the interpreter lock, so that no signal handler runs.

    The function locks a mutex twice. A mutex whose bytes are all zero is unlocked, so a zeroed buffer serves as the
    mutex.
    """
    libc = ctypes.PyDLL(None)
    lock = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
