"""Which process is meant, beyond its number: pids are reused, and mean nothing on another host or in another container.

A process is told apart by host, boot, pid namespace, pid and start time. Where one of them cannot be known (another
host, a system without /proc), `lives` says so instead of guessing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from txl_dist.io.files import typed

_MAX_NAME = 512


class ProcessId(NamedTuple):
    """One process in the world. JSON keeps it as a list."""

    host: str
    place: str
    """Boot and pid namespace: pids can be compared only where these are equal; empty where they are not known."""
    pid: int
    start_ticks: int
    """Clock ticks from boot to its start; exact, whatever is done to the wall clock."""

    def lives(self) -> bool | None:
        """Whether it still runs, be it stopped; None if that cannot be seen from here."""
        if not self.place or (self.host, self.place) != _here():
            return None
        status = _status(self.pid)
        return status is not None and status.start_ticks == self.start_ticks and status.state not in "ZX"


def process_of(values: object) -> ProcessId:
    """A process as JSON has it. Raises ValueError for anything else."""
    process = typed(ProcessId, values)
    if max(len(process.host), len(process.place)) > _MAX_NAME or process.pid >= 1 << 31:
        raise ValueError(f"{process!r:.80} is no process")
    return process


def process_id(pid: int = 0) -> ProcessId:
    """Of a process that is visible here; 0 means this one."""
    pid = pid or os.getpid()
    status = _status(pid)
    return ProcessId(*_here(), pid, status.start_ticks if status else 0)


def parent_of(pid: int) -> int:
    """Its parent's pid; 0 if it has none, is gone or cannot be seen."""
    status = _status(pid)
    return status.parent if status else 0


def command_of(pid: int) -> list[str]:
    """The words of its command line; none if it is gone or cannot be seen."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def group_members(group: int) -> list[int]:
    """Pids of the living processes of a process group."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (status := _status(pid)) and status.group == group and status.state not in "ZX"]


class _Status(NamedTuple):
    state: str
    parent: int
    group: int
    start_ticks: int


def _status(pid: int) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()  # the name before it may hold blanks and brackets
    return _Status(fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def _here() -> tuple[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return socket.gethostname(), f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname(), ""
