"""Connections that exchange lines of JSON between processes of a job, for heartbeats and for recovery.

Each line is one message. A connection receives what has arrived, and never waits for more. It waits at most 1 s to
send a line that is longer than the socket's buffer.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

from txl_dist.io.files import parse_object

MAX_LINE_BYTES = 1 << 20
"""Maximum number of bytes of one line of JSON. A connection that sends a longer line is closed. The longest line is a
plan of recovery: about 100 bytes for each rank that was lost at once."""
_READ_BYTES = 1 << 16
_SEND_S = 1.0
"""Seconds in which the peer must take a line."""

Message = dict[str, Any]
"""One line of JSON between processes, for example a report of a rank's progress."""


def encode_shared(values: Message) -> bytes:
    """Encode values that many messages have in common, once for all of them. `Connection.send` takes the result."""
    return json.dumps(values).encode()[1:]


class Connection:
    """Connection that exchanges JSON lines over a socket."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.peer = peer
        self._rest = b""

    def send(self, message: Message, *, shared: bytes = b"") -> None:
        """Send one line. Raises OSError if the peer is gone, or has not read for a long time.

        `shared` are further values of the message from `encode_shared`, or empty.
        """
        line = json.dumps(message).encode()
        if shared:
            line = line[:-1] + b", " + shared
        rest = memoryview(line + b"\n")
        end_s = time.monotonic() + _SEND_S
        while rest:
            try:
                rest = rest[self.peer.send(rest) :]
            except BlockingIOError:
                buffer = select.poll()
                buffer.register(self.peer, select.POLLOUT)
                if not buffer.poll(1000 * max(0.0, end_s - time.monotonic())):
                    raise

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises OSError if the peer is gone, and ValueError for malformed lines.
        """
        try:
            data = self.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"the peer sent more than {MAX_LINE_BYTES} bytes without the end of a line")
        return [parse_object(line) for line in lines]


def end_when_unreachable(peer: socket.socket, *, after_s: float) -> None:
    """Let the kernel end a TCP connection whose peer was unreachable for `after_s` seconds. Then it raises OSError.

    A node that has lost its power or its network closes no connection. Without this the kernel waits for hours if no
    data is in flight, and for 15 minutes otherwise.
    """
    interval_s = min(max(1, int(after_s / 4)), 32767)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * after_s))  # counts for data in flight


def listen() -> socket.socket:
    """Return a socket that listens on a free port of all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
