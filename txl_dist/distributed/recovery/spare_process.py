"""The spare of a node as its agent sees it: started, asked for replacements, and restarted when it fails.

    start --> connected within START_S --> asked: an answer within ANSWER_S --> idle: asked every PING_EVERY_S
      ^                 |                            |                                   |
      +-----------------+----------------------------+-----------------------------------+  dead or silent: killed

The agent never waits here: a killed process that is inside the kernel may not end for minutes.

The spare that follows gets the requests that its predecessor has not answered. After `ATTEMPTS` failures in a row the
requests are given back to the caller, so no rank waits forever for a replacement.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from txl_dist.distributed.connection import Connection, Message
from txl_dist.distributed.recovery.printing import say

START_S = 180.0
"""Seconds in which a spare must have imported everything and connected. A cold network file system takes minutes."""
ANSWER_S = 10.0
"""Seconds in which a spare must answer."""
PING_EVERY_S = 10.0
"""Seconds between two questions to an idle spare."""
END_S = 2.0
"""Seconds in which a spare ends by itself when its connection ends. It may take a second to look for stopped
replacements."""
RETRY_S = 1.0
"""Seconds between two attempts to start a process, for instance while the system has reached its limit of processes."""
ATTEMPTS = 3
"""Number of spares in a row that may fail, before a request for a replacement is given back."""


class Child(Protocol):
    """Interface of a process that an agent has started, as `subprocess.Popen` implements it."""

    @property
    def pid(self) -> int:
        """Number of the process."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""

    def kill(self) -> None:
        """Send SIGKILL to the process."""


class SpareProcess:
    """The spare of this node. All times are of the monotonic clock."""

    def __init__(self, start: Callable[[], Child]) -> None:
        """Start nothing yet. `start` starts a process that sends `spare` once it has imported everything."""
        self._start = start
        self._child: Child | None = None
        self._link: Connection | None = None
        self._requests: list[list[object]] = []
        """Seats for which the spare must fork a replacement, in order. The spare has not answered them."""
        self._num_sent = 0
        """Number of requests that were sent to the present spare."""
        self._due_s = 0.0
        """Time by which the spare must connect or answer, or 0 if no answer is due."""
        self._is_lost = False
        """Whether the connection of the spare has ended."""
        self._ping_s = 0.0
        """Time of the next question to an idle spare."""
        self._num_failed = 0
        """Number of spares that have failed since the last answer of one."""
        self._start_error: OSError | None = None
        """Error of the last attempt to start a spare, until `look` acts on it at `_retry_s`."""
        self._retry_s = 0.0
        self._killed: list[Child] = []
        """Spares that were killed and may not have ended."""

    def ensure(self, now_s: float) -> None:
        """Start a spare if there is none. If the system starts no process now, `look` tries again."""
        if self._child is not None or self._start_error is not None:
            return
        try:
            self._child = self._start()
        except OSError as error:
            self._start_error = error
            self._retry_s = now_s + RETRY_S
            return
        self._num_sent = 0
        self._due_s = now_s + START_S

    def request(self, seat: list[object], now_s: float) -> None:
        """Ask for a replacement with this seat. A request that is still open is not repeated."""
        if seat in self._requests:
            return
        if not self._requests and self._child is None:
            self._num_failed = 0  # earlier spares have failed, and this is a new request
        self._requests.append(seat)
        self.ensure(now_s)
        self._send(now_s)

    def connect(self, link: Connection, now_s: float) -> None:
        """Note that the spare has imported everything, and waits for requests at this connection."""
        self._link = link
        self._is_lost = False
        self._due_s = 0.0
        self._ping_s = now_s + PING_EVERY_S
        self._send(now_s)

    def is_at(self, link: Connection) -> bool:
        """Return whether a connection is that of the spare."""
        return link is self._link

    def answer(self, message: Message, now_s: float) -> None:
        """Act on an answer of the spare: it has forked a replacement, or it is idle and alive."""
        self._num_failed = 0
        self._ping_s = now_s + PING_EVERY_S
        if message["kind"] == "forked":
            self._requests.pop(0)
            self._num_sent -= 1
        self._due_s = now_s + ANSWER_S if self._num_sent else 0.0

    def look(self, now_s: float) -> list[list[object]]:
        """Notice a spare that is dead or silent, and start another one.

        Returns the seats whose requests are given back after `ATTEMPTS` failures in a row. Otherwise returns an empty
        list.
        """
        self._killed = [child for child in self._killed if child.poll() is None]
        if self._start_error is not None and now_s > self._retry_s:
            error, self._start_error = self._start_error, None
            return self._count_failure(f"cannot be started: {error}", now_s)
        if self._child is None:
            return []
        if self._is_lost or self._child.poll() is not None:
            return self._fail("has ended", now_s)
        if self._due_s and now_s > self._due_s:
            return self._fail(f"did not answer for {ANSWER_S if self._link else START_S:g} s", now_s)
        if self._link is not None and not self._due_s and now_s > self._ping_s:
            self._due_s = now_s + ANSWER_S
            with suppress(OSError):  # its end is noticed by the next call
                self._link.send({"kind": "ping"})
        return []

    def end(self) -> None:
        """End the spare, if there is one.

        When its connection ends, the spare first kills replacements that are stopped.
        """
        if self._child is None:
            return
        if self._link is not None:
            with suppress(OSError):  # it is gone
                self._link.peer.shutdown(socket.SHUT_RDWR)
            end_s = time.monotonic() + END_S
            while self._child.poll() is None and time.monotonic() < end_s:
                time.sleep(0.01)
        self._child.kill()

    def disconnect(self) -> None:
        """Note that the connection of the spare has ended. `look` then starts another spare."""
        self._link = None
        self._is_lost = True

    def _send(self, now_s: float) -> None:
        """Send the requests that the spare has not got yet."""
        if self._link is None:
            return
        for seat in self._requests[self._num_sent :]:
            with suppress(OSError):  # its end is noticed by `look`, and another spare gets the request
                self._link.send({"kind": "fork", "seat": seat})
            self._num_sent += 1
            self._due_s = now_s + ANSWER_S

    def _fail(self, how: str, now_s: float) -> list[list[object]]:
        """Kill the spare and start another one. Returns the requests if too many have failed."""
        assert self._child is not None
        pid = self._child.pid
        self._child.kill()
        self._killed.append(self._child)
        self._child = None
        self._link = None
        self._is_lost = False
        self._due_s = 0.0
        return self._count_failure(f"(pid {pid}) {how}", now_s)

    def _count_failure(self, how: str, now_s: float) -> list[list[object]]:
        """Say that a spare has failed, and start another one. Returns the requests if too many have failed."""
        self._num_failed += 1
        if self._num_failed < ATTEMPTS:
            then = "Another one is started"
        else:
            number = self._num_failed
            then = f"It was number {number} in a row to fail. The next one is started when a rank must be replaced"
        say(f"the spare on {socket.gethostname()} {how}. {then}")
        if self._num_failed < ATTEMPTS:
            self.ensure(now_s)
            return []
        given_back = self._requests
        self._requests = []
        return given_back
