"""Identity of a process beyond its pid, because pids are reused and mean nothing on another host or in a container.

A process is identified by its host, boot, pid namespace, pid and start time. If one of these values cannot be known (on
another host, or on a system without /proc), `ProcessId.lives` returns None instead of a guess.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from txl_dist.io.files import typed

_MAX_NAME = 512
_MAX_COMM = 15
"""Number of bytes of a process's name that Linux keeps."""


class ProcessId(NamedTuple):
    """Identity of one process on any host, for example of the owner of a lock. In JSON this identity is a list."""

    host: str
    """Name of the host on which the process runs."""
    place: str
    """Boot id and pid namespace of the process. Two pids can be compared only if their hosts and places are equal. The
    text is empty if the place is unknown."""
    pid: int
    start_ticks: int
    """Clock ticks from boot to the start of the process. Changes of the wall clock do not affect it."""

    def lives(self) -> bool | None:
        """Return whether the process still exists, running or stopped. Returns None if this host cannot find out."""
        if not self.place or (self.host, self.place) != _here():
            return None
        status = _status(self.pid)
        return status is not None and status.start_ticks == self.start_ticks and status.state not in "ZX"


def process_of(values: object) -> ProcessId:
    """Return the process identity that JSON values describe. Raises ValueError for any other values."""
    process = typed(ProcessId, values)
    if max(len(process.host), len(process.place)) > _MAX_NAME or process.pid >= 1 << 31:
        raise ValueError(f"{process!r:.80} is not a process")
    return process


def process_id(pid: int = 0) -> ProcessId:
    """Return the identity of a process of this host. A pid of 0 means the present process."""
    pid = pid or os.getpid()
    status = _status(pid)
    if status:
        start_ticks = status.start_ticks
    else:
        start_ticks = 0
    host, place = _here()
    return ProcessId(host, place, pid, start_ticks)


def process_age_s(pid: int = 0) -> float:
    """Return the seconds since a process of this host started, or 0 if that is unknown. A pid of 0 means the present
    process."""
    start_ticks = process_id(pid).start_ticks
    if start_ticks:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent. Returns 0 if it has no parent, has ended or cannot be seen."""
    status = _status(pid)
    if status:
        return status.parent
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped (SIGSTOP)."""
    status = _status(pid)
    return status is not None and status.state == "T"


def name_process(name: str) -> None:
    """Set the name of this process, which `ps -o comm` and `pgrep -x` show. It is cut after 15 bytes.

    Threads that run keep their names. Does nothing on a system without /proc.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:_MAX_COMM], encoding="utf-8")


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line. The list is empty if the process has ended or cannot be seen."""
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return content.decode(errors="replace").rstrip("\0").split("\0")


def group_members(group: int) -> list[int]:
    """Return the pids of the running or stopped processes in a process group."""
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        status = _status(pid)
        if status and status.group == group and status.state not in "ZX":
            members.append(pid)
    return members


class _Status(NamedTuple):
    """Fields of /proc/PID/stat that this module uses."""

    state: str
    """State as one letter. Z is a zombie, and X is a dead process."""
    parent: int
    """Pid of the parent process."""
    group: int
    """Id of the process group."""
    start_ticks: int
    """Clock ticks from boot to the start of the process."""


def _status(pid: int) -> _Status | None:
    """Return the status of a process, or None if the process has ended or cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()  # the process name before them may contain blanks and brackets
    return _Status(fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def _here() -> tuple[str, str]:
    """Return (host, boot id and pid namespace) of this process. The second text is empty on a system without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return socket.gethostname(), f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname(), ""
