"""Lines of JSON over a socket: long ones arrive whole, and a peer that does not read is noticed."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from txl_dist.distributed import connection
from txl_dist.distributed.connection import Connection, encode_shared

TEXT = "x" * 1_000_000


def test_a_line_longer_than_the_buffer_of_the_socket_arrives_whole() -> None:
    left, right = socket.socketpair()
    received: list[dict[str, Any]] = []

    def receive() -> None:
        reader = Connection(right)
        right.settimeout(30.0)
        while not received:
            received.extend(reader.receive())

    thread = threading.Thread(target=receive)
    thread.start()
    Connection(left).send({"text": TEXT})
    thread.join(30.0)
    assert received == [{"text": TEXT}]
    left.close()
    right.close()


def test_values_that_several_messages_share_arrive_as_values_of_each() -> None:
    shared = encode_shared({"losses": [[1, "a"]], "step": 5})
    left, right = socket.socketpair()
    with left, right:
        for number in range(2):
            Connection(left).send({"rank": number}, shared=shared)
        expected = [{"rank": number, "losses": [[1, "a"]], "step": 5} for number in range(2)]
        assert Connection(right).receive() == expected


def test_a_peer_that_does_not_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SEND_S", 0.05)
    left, right = socket.socketpair()
    with left, right, pytest.raises(OSError):
        Connection(left).send({"text": TEXT})
