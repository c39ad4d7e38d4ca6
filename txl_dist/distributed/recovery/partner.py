"""Copies of states on other nodes: a server in each agent keeps them, and ranks store and fetch them.

    rank --put--> agent on the next node     the version that the rank has just stored. Acknowledged when it is whole
    rank --list--> its own agent             the versions of this agent's rank, and those that it keeps for other ranks
    rank 0 --list--> agents without a rank   the same
    rank --get--> agent that keeps it        a version that the rank has lost with its node, or that is damaged

The server keeps two slots per rank, so the last version stays valid until the next one is whole. The sockets block. A
rank ends a transfer from another thread by shutting its socket down.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from txl_dist.distributed.connection import end_when_unreachable, listen
from txl_dist.distributed.recovery.slot_file import HEAD_BYTES, SlotFile, Version, head_of, slot_to_replace

NUM_PARTNER_SLOTS = 2
"""Number of versions that an agent keeps for a rank of another node."""
CONNECT_S = 10.0
"""Seconds in which a connection to an agent must succeed, and in which it must list its versions."""
_KEY_LEN = 16
_REQUEST = struct.Struct(f"{_KEY_LEN}s4sqqqq")
"""Request: key of the server, name, version, serial number to keep."""
_REPLY = struct.Struct("q")
"""Reply: 0, or the number of an error (`errno`). The reply to a list is the number of its entries."""
_ENTRY = struct.Struct("qqq")


def num_own_slots(*, has_partner: bool, partner_every: int) -> int:
    """Return the number of versions that an agent keeps for its own rank.

    With partner copies every `partner_every` > 1 versions, one of them is the last version that was sent.
    """
    return 3 if has_partner and partner_every > 1 else 2


class PartnerAddress(NamedTuple):
    """Address of the server in an agent. JSON stores it as a list."""

    host: str
    port: int
    key: str
    """Random key that each request must contain."""


def partner_of(rank: int, nodes: Sequence[str]) -> int | None:
    """Return the rank whose agent keeps copies of `rank`: the one with the same local rank on the next node.

    `nodes` has the name of each rank's node. Returns None if there is only one node.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    following = order[(order.index(nodes[rank]) + 1) % len(order)]
    local_ranks = [number for number, node in enumerate(nodes) if node == nodes[rank]]
    candidates = [number for number, node in enumerate(nodes) if node == following]
    return candidates[local_ranks.index(rank) % len(candidates)]


class _Shelf:
    """The slots for the versions of one rank, and the connection that writes them."""

    def __init__(self, rank: int) -> None:
        files = [os.memfd_create(f"txl_partner_{rank}", os.MFD_CLOEXEC) for _ in range(NUM_PARTNER_SLOTS)]
        self.slots = [SlotFile(file) for file in files]
        self.lock = threading.Lock()
        self.writer: socket.socket | None = None

    def lend_to(self, peer: socket.socket) -> None:
        """Let a connection write. A connection of an earlier process of the rank ends, whatever it waits for."""
        if self.writer is not None and self.writer is not peer:
            with suppress(OSError):
                self.writer.shutdown(socket.SHUT_RDWR)
        self.writer = peer


class PartnerServer:
    """Server in an agent that keeps versions of ranks of other nodes, in memory that the agent owns."""

    def __init__(self, *, unreachable_s: float) -> None:
        """Start the server. The connection of a rank whose node was unreachable for `unreachable_s` seconds ends."""
        self._unreachable_s = unreachable_s
        self.key = secrets.token_hex(_KEY_LEN // 2)
        self._listener = listen()
        self.port: int = self._listener.getsockname()[1]
        self._shelves: dict[int, _Shelf] = {}
        self._lock = threading.Lock()
        self._offered: list[SlotFile] = []
        threading.Thread(target=self._accept, name="partner copies", daemon=True).start()

    def offer(self, slots: Sequence[SlotFile]) -> None:
        """Let ranks fetch from these slots too. They are those of the agent's own rank."""
        self._offered = list(slots)

    def close(self) -> None:
        """Accept no more connections. The memory is released when the process ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # `close` was called
                    return
                time.sleep(0.1)  # the peer is gone already, or there is no descriptor left
                continue
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_unreachable(peer, after_s=self._unreachable_s)
            threading.Thread(target=self._serve, args=(peer,), name="partner copy", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """Answer the requests of one rank, until it closes the connection. A malformed request ends it too."""
        with peer, suppress(OSError, ValueError):
            while True:
                key, name, *numbers, kept = _REQUEST.unpack(_receive(peer, _REQUEST.size))
                if key != self.key.encode():
                    return
                if name == b"put ":
                    self._put(peer, Version(*numbers), kept=kept)
                elif name == b"get ":
                    self._get(peer, Version(*numbers))
                elif name == b"list":
                    slots = (*self._slots(), *self._offered)
                    versions = [slot.head.version for slot in slots if slot.head.serial]
                    peer.sendall(_REPLY.pack(len(versions)) + b"".join(_ENTRY.pack(*one) for one in versions))
                else:
                    return

    def _slots(self) -> list[SlotFile]:
        return [slot for shelf in list(self._shelves.values()) for slot in shelf.slots]

    def _put(self, peer: socket.socket, version: Version, *, kept: int) -> None:
        """Receive a version of a rank. The version with the serial number `kept` stays valid."""
        with self._lock:
            if kept < version.serial:  # else the same version is sent again, after a loss
                self._release_before(kept)
            if version.rank not in self._shelves:
                self._shelves[version.rank] = _Shelf(version.rank)
            shelf = self._shelves[version.rank]
        shelf.lend_to(peer)
        with shelf.lock:
            peer.sendall(_REPLY.pack(_receive_slot(peer, slot_to_replace(shelf.slots, kept={kept} - {0}))))

    def _release_before(self, serial: int) -> None:
        """Release the memory of ranks that do not send here any more, because ranks were numbered again.

        All ranks have stored version `serial`, so the newest version of those that still send is not older.
        """
        for rank, shelf in list(self._shelves.items()):
            if all(slot.head.serial < serial for slot in shelf.slots):
                del self._shelves[rank]
                for slot in shelf.slots:
                    slot.close()

    def _get(self, peer: socket.socket, version: Version) -> None:
        """Send a version, or say that it is not here."""
        for slot in (*self._slots(), *self._offered):
            if slot.head.version == version:
                peer.sendall(_REPLY.pack(0))
                _send_slot(peer, slot)
                return
        peer.sendall(_REPLY.pack(errno.ENOENT))


class PartnerConnection:
    """Connection of a rank to the server in an agent. All methods raise OSError if the transfer fails.

    ConnectionError, a kind of OSError, means that the agent is gone. Other errors are those of the agent, for instance
    that it has no memory left.
    """

    def __init__(self, address: PartnerAddress) -> None:
        """Connect to the server. Raises OSError if that is not possible."""
        self._key = address.key.encode()
        self._peer = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer.settimeout(None)

    def close(self) -> None:
        """Close the connection to the agent."""
        self._peer.close()

    def put(self, slot: SlotFile, *, kept: int) -> None:
        """Send the version in a slot, and wait until the agent has it. The version with serial number `kept` stays."""
        self._ask(b"put ", slot.head.version, kept=kept)
        _send_slot(self._peer, slot)
        self._check_reply()

    def get(self, version: Version, into: SlotFile) -> None:
        """Fetch a version into a slot. The version in the slot is lost.

        Raises TimeoutError if the agent sends nothing for `CONNECT_S`.
        """
        self._peer.settimeout(CONNECT_S)
        self._ask(b"get ", version)
        self._check_reply()
        _raise(_receive_slot(self._peer, into))

    def versions(self) -> list[Version]:
        """Return the versions of the agent's own rank, and those that it keeps for ranks of other nodes.

        An agent that is frozen does not answer within `CONNECT_S`, which is an error too.
        """
        self._peer.settimeout(CONNECT_S)
        self._ask(b"list", Version(0, 0, 0))
        (count,) = _REPLY.unpack(_receive(self._peer, _REPLY.size))
        content = _receive(self._peer, count * _ENTRY.size)
        self._peer.settimeout(None)
        return [Version(*entry) for entry in _ENTRY.iter_unpack(content)]

    def _ask(self, name: bytes, version: Version, *, kept: int = 0) -> None:
        self._peer.sendall(_REQUEST.pack(self._key, name, *version, kept))

    def _check_reply(self) -> None:
        (error,) = _REPLY.unpack(_receive(self._peer, _REPLY.size))
        _raise(error)


def _raise(error: int) -> None:
    """Raise OSError for the number of an error. 0 is none."""
    if error:
        raise OSError(error, os.strerror(error))


def _send_slot(peer: socket.socket, slot: SlotFile) -> None:
    """Send a slot whole. Waits after its head until the receiver has made room."""
    head = slot.head
    peer.sendall(head.to_bytes())
    (error,) = _REPLY.unpack(_receive(peer, _REPLY.size))
    _raise(error)
    with memoryview(slot.mapped(head.num_bytes)) as content:
        peer.sendall(content[HEAD_BYTES : head.num_bytes])


def _receive_slot(peer: socket.socket, slot: SlotFile) -> int:
    """Receive what `_send_slot` sends. Returns 0, or the number of the error if the content is damaged.

    Raises ConnectionError if the sender is gone, and OSError if there is not enough memory, which the sender learns.
    """
    head = head_of(_receive(peer, HEAD_BYTES))
    try:
        content = slot.begin(head.num_bytes)
    except OSError as error:
        peer.sendall(_REPLY.pack(error.errno or errno.ENOMEM))
        raise
    peer.sendall(_REPLY.pack(0))
    with memoryview(content) as whole:
        _receive_into(peer, whole[HEAD_BYTES : head.num_bytes])
    if not slot.holds(head):
        return errno.EIO
    slot.finish(head)
    return 0


def _receive(peer: socket.socket, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    _receive_into(peer, memoryview(content))
    return bytes(content)


def _receive_into(peer: socket.socket, target: memoryview) -> None:
    """Fill the target. Raises ConnectionError if the peer closes the connection before."""
    num_read = 0
    while num_read < len(target):
        count = peer.recv_into(target[num_read:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        num_read += count
