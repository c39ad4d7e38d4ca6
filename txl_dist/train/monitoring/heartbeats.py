"""Heartbeats: each rank reports its step and its phase (part of the step) once a second, even if its main thread hangs.

    rank 1 .. n (Spoke) --(JSON lines over TCP)--> rank 0 (Hub)

The hub answers each report with the report of rank 0. The hub passes notices of a rank, for instance about an error, on
to all ranks. A rank and the hub exchange about 200 bytes per second.

The ranks use sockets of their own, not torch's TCPStore. Calls of a TCPStore wait forever for a frozen server (measured
with torch 2.13 and SIGSTOP: the timeout does not apply), and print C++ stacks if the server is gone. A socket separates
the two cases: a process that dies closes its connections at once, but a frozen process only stops sending.

Each line carries a random key that the hub shares over the process group. Lines with another key are dropped.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from txl_dist.distributed.connection import Connection, Message, listen
from txl_dist.distributed.processes import ProcessId, process_of
from txl_dist.io.files import typed

EXCHANGE_EVERY_S = 1.0
"""Seconds between two heartbeats that a rank sends to rank 0."""
TICK_S = 0.25
"""Maximum number of seconds for which `exchange` waits at a time for new messages."""
CONNECT_S = 5.0
"""Maximum number of seconds to wait for a connection to rank 0."""


class Beat(NamedTuple):
    """Report of a rank about its own progress, which it sends once a second. In JSON it is a list."""

    process: ProcessId
    """Process of the rank, with its host and pid."""
    step: int
    """Training step that the rank has reached."""
    phase: str
    """Part of the step that the main thread has begun, for instance data or save."""
    where: str
    """Line of code that the main thread runs."""
    is_waiting: bool
    """Whether the main thread is inside a collective."""
    is_stalled: bool
    """Whether the main thread made no progress for longer than the watchdog's limit."""
    asks: bool
    """Whether the main thread had an error, and now waits until the watchdog finds out whether another rank has caused
    this error."""
    is_idle: bool = False
    """Whether the main thread made no progress for longer than half the watchdog's limit."""


@dataclass
class Seen:
    """Latest report of a rank. Times are in seconds, on the monotonic clock of the rank that received the report."""

    beat: Beat
    """Content of the latest report."""
    heard_s: float
    """Time at which the report was received."""
    closed_s: float | None = None
    """Time at which the rank's connection broke, or None while the connection is open."""
    has_left: bool = False
    """Whether the rank announced that it ends, or reported an error of its own."""


class Hub:
    """Rank 0's end of the connections for heartbeats. It receives the reports of all other ranks, and sends notices to
    all of them."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(8)
        self.seen: dict[int, Seen] = {}
        self._server = listen()
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._connections: dict[Connection, int] = {}

    def exchange(self, own: Beat) -> list[Message]:
        """Receive the messages that have arrived since the last call, or arrive within `TICK_S` seconds. `own` is rank
        0's report.

        Returns the notices of other ranks.
        """
        self.seen[0] = Seen(own, time.monotonic())
        notices: list[Message] = []
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._server:
                with suppress(OSError):  # the peer is gone already, or there is no descriptor left
                    peer, _ = self._server.accept()
                    connection = Connection(peer)
                    self._connections[connection] = -1
                    self._selector.register(peer, selectors.EVENT_READ, connection)
            else:
                notices += self._hear(key.data, own)
        return notices

    def tell(self, notice: Message) -> None:
        """Send a notice to all connected ranks. Connections that fail are closed."""
        for connection in list(self._connections):
            try:
                connection.send(notice)
            except OSError:
                self._drop(connection)

    def _hear(self, connection: Connection, own: Beat) -> list[Message]:
        """Receive the reports of one connection and answer each report. Returns the notices.

        A connection that fails is dropped.
        """
        notices = []
        try:
            for message in connection.receive():
                if message.get("key") != self.key:
                    raise ValueError("the line does not contain the key of this job, so another program sent the line")
                rank = self._connections[connection] = int(message["rank"])
                self.seen[rank] = Seen(_beat(message["beat"]), time.monotonic(), has_left="left" in message)
                connection.send({"beat": own})
                if "notice" in message:
                    notices.append(message["notice"])
        except (OSError, ValueError, TypeError, KeyError):
            self._drop(connection)
        return notices

    def _drop(self, connection: Connection) -> None:
        """Close a connection that failed, and record when the connection of its rank ended."""
        self._selector.unregister(connection.peer)
        connection.peer.close()
        seen = self.seen.get(self._connections.pop(connection))
        if seen is not None and seen.closed_s is None:
            seen.closed_s = time.monotonic()


class Spoke:
    """Connection for heartbeats from a rank other than 0 to rank 0.

    It exchanges reports with rank 0 only, so its `seen` has only the reports of rank 0 and of this rank.
    """

    def __init__(self, *, rank: int, key: str, port: int) -> None:
        self.seen: dict[int, Seen] = {}
        self._rank = rank
        self._key = key
        self._address = (os.environ["MASTER_ADDR"], port)
        self._connection: Connection | None = None
        self._selector = selectors.DefaultSelector()
        self._is_answered = True

    def exchange(self, own: Beat) -> list[Message]:
        """Send `own`, this rank's report, and receive messages of rank 0 for about a second. Returns the notices of
        rank 0."""
        end_s = time.monotonic() + EXCHANGE_EVERY_S
        self._say({"beat": own})
        notices: list[Message] = []
        while self._connection is not None and not notices and (rest_s := end_s - time.monotonic()) > 0:
            if self._selector.select(rest_s):
                notices += self._hear()
        if self._connection is None:
            time.sleep(max(0.0, min(TICK_S, end_s - time.monotonic())))
        self.seen[self._rank] = Seen(own, time.monotonic())
        return notices

    def tell(self, notice: Message) -> None:
        """Send a notice to rank 0, which passes it on to all ranks."""
        own = self.seen[self._rank].beat
        self._is_answered = True  # even if the last beat was not answered: this is the last chance
        self._say({"beat": own, "notice": notice, "left": True})

    def _say(self, message: Message) -> None:
        """Send a message to rank 0, if rank 0 has answered the last message. Otherwise unread messages would
        accumulate."""
        try:
            if self._connection is None:
                peer = socket.create_connection(self._address, timeout=CONNECT_S)
                self._connection = Connection(peer)
                self._selector.register(peer, selectors.EVENT_READ)
                self._is_answered = True
            if self._is_answered:
                self._connection.send({"key": self._key, "rank": self._rank, **message})
                self._is_answered = False
        except OSError:
            self._drop()

    def _hear(self) -> list[Message]:
        """Receive reports and notices of rank 0. Returns the notices. A connection that fails is dropped."""
        notices = []
        try:
            assert self._connection is not None
            for message in self._connection.receive():
                if "beat" in message:
                    self._is_answered = True
                    self.seen[0] = Seen(_beat(message["beat"]), time.monotonic())
                else:
                    notices.append(message)
        except (OSError, ValueError, TypeError):
            self._drop()
        return notices

    def _drop(self) -> None:
        """Close the connection to rank 0 after it failed, and record when it ended."""
        if self._connection is not None:
            self._selector.unregister(self._connection.peer)
            self._connection.peer.close()
            self._connection = None
        if 0 in self.seen and self.seen[0].closed_s is None:
            self.seen[0].closed_s = time.monotonic()


def _beat(values: object) -> Beat:
    """Return the report that `values`, a list from JSON, describes. Raises ValueError or TypeError for other values."""
    beat = typed(Beat, values)
    return beat._replace(process=process_of(beat.process))
