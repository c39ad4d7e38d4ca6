"""A way to end pending collectives of gloo from any thread: the sockets that gloo opened are shut down.

gloo cannot abort a collective. If a rank dies, only those ranks that exchange data with it at that moment notice it at
once. The others wait until the timeout, which is minutes. `ProcessGroupGloo.abort` of torch 2.13 does nothing, and
`destroy_process_group` closes no socket while another object refers to the group. Both ends see the shutdown of a
socket at once, as they would see the death of the process.

The sockets are recognised as those that appeared while the process groups were made. Sockets that listen are left
alone, because gloo aborts the process if its listener fails.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class SocketCut:
    """Collection of the sockets of this process's groups, which can be shut down."""

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Return a context manager whose block makes process groups. The sockets that it opens are collected."""
        self._before = _open_sockets()
        try:
            yield
        finally:
            self._collect()
            self._before = None

    def cut(self) -> int:
        """Shut the sockets down, also those that an unfinished `collecting` block has opened. Returns their number."""
        self._collect()
        count = 0
        for descriptor, inode in list(self._sockets.items()):
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:  # else it was closed, and its number is used again
                    count += _shut_down(descriptor)
        return count

    def _collect(self) -> None:
        before = self._before
        if before is not None:
            for descriptor, inode in _open_sockets().items():
                if before.get(descriptor) != inode:
                    self._sockets[descriptor] = inode


def _open_sockets() -> dict[int, int]:
    """Return the sockets of this process: inode by descriptor."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[int(name)] = status.st_ino
    return sockets


def _shut_down(descriptor: int) -> int:
    """Shut a connected socket down. Returns 1, or 0 for a socket that listens. Raises OSError if it is not connected.

    The descriptor stays open: its owner closes it.
    """
    with socket.socket(fileno=os.dup(descriptor)) as peer:
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return 0
        peer.shutdown(socket.SHUT_RDWR)
    return 1
