"""Connections that exchange lines of JSON between processes of a job, for heartbeats and for recovery.

Each line is one message. A connection never blocks: it sends what the peer can take, and receives what has arrived.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from txl_dist.io.files import parse_object

MAX_LINE_BYTES = 1 << 16
"""Maximum number of bytes of one line of JSON. A connection that sends a longer line is closed."""

Message = dict[str, Any]
"""One line of JSON between processes, for example a report of a rank's progress."""


class Connection:
    """Connection that exchanges JSON lines over a socket and never blocks."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.peer = peer
        self._rest = b""

    def send(self, message: Message) -> None:
        """Send one line. Raises OSError if the peer is gone, or has not read for a long time."""
        self.peer.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises OSError if the peer is gone, and ValueError for malformed lines.
        """
        try:
            data = self.peer.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"the peer sent more than {MAX_LINE_BYTES} bytes without the end of a line")
        return [parse_object(line) for line in lines]


def listen() -> socket.socket:
    """Return a socket that listens on a free port of all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
