"""Copies on another node: what is acknowledged can be fetched, and nothing valid is lost while a version arrives."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.helpers.open_files import open_files
from txl_dist.distributed.recovery import partner, slot_file
from txl_dist.distributed.recovery.partner import PartnerAddress, PartnerConnection, PartnerServer, partner_of
from txl_dist.distributed.recovery.slot_file import HEAD_BYTES, NO_VERSION, SlotFile, SlotHead, Version, slot_to_replace


def new_slot() -> SlotFile:
    return SlotFile(os.memfd_create("slot"))


def fill(slot: SlotFile, serial: int, *, rank: int = 3, content: bytes = b"0123456789" * 100_000) -> SlotFile:
    memory = slot.begin(HEAD_BYTES + len(content))
    memory[HEAD_BYTES : HEAD_BYTES + len(content)] = content
    slot.finish(SlotHead(serial, rank, 4, len(content), 0, 0, slot_file.hash_of(content)))
    return slot


def content_of(slot: SlotFile) -> bytes:
    return slot.mapped(slot.head.num_bytes)[HEAD_BYTES : slot.head.num_bytes]


@pytest.fixture
def server() -> Iterator[PartnerServer]:
    one = PartnerServer(unreachable_s=60.0)
    yield one
    one.close()


@pytest.fixture
def rank(server: PartnerServer) -> Iterator[PartnerConnection]:
    connection = connect(server)
    yield connection
    connection.close()


def connect(server: PartnerServer) -> PartnerConnection:
    return PartnerConnection(PartnerAddress("127.0.0.1", server.port, server.key))


def serials(connection: PartnerConnection) -> list[int]:
    return sorted(version.serial for version in connection.versions())


def test_what_was_acknowledged_is_fetched_bit_for_bit(server: PartnerServer, rank: PartnerConnection) -> None:
    sent = fill(new_slot(), 7, content=os.urandom(3_000_001))
    rank.put(sent, kept=0)
    fetched, other = new_slot(), connect(server)
    other.get(Version(7, 4, 3), fetched)
    other.close()
    assert fetched.head == sent.head
    assert content_of(fetched) == content_of(sent)
    assert fetched.is_whole()


def test_the_version_to_keep_stays_whatever_its_number(rank: PartnerConnection) -> None:
    """After a recovery the agent may hold a newer version that was never complete on all ranks."""
    slot = new_slot()
    for serial, kept in ((5, 0), (6, 5), (5, 5)):
        rank.put(fill(slot, serial), kept=kept)
    assert 5 in serials(rank)
    rank.put(fill(slot, 8), kept=5)
    assert serials(rank) == [5, 8]


def test_ranks_that_send_here_no_more_are_forgotten_once_a_later_version_is_stored_by_all(
    rank: PartnerConnection,
) -> None:
    """The job has continued with fewer ranks, so this agent keeps copies of other ranks than before."""
    slot = new_slot()
    rank.put(fill(slot, 5, rank=3), kept=0)
    rank.put(fill(slot, 6, rank=1), kept=6)  # sent again after a loss
    rank.put(fill(slot, 6, rank=2), kept=6)
    assert serials(rank) == [5, 6, 6]
    rank.put(fill(slot, 7, rank=1), kept=6)
    assert serials(rank) == [6, 6, 7]
    rank.put(fill(slot, 7, rank=2), kept=6)
    assert serials(rank) == [6, 6, 7, 7]


def test_a_version_that_arrives_by_half_replaces_nothing_valid(server: PartnerServer, rank: PartnerConnection) -> None:
    slot = new_slot()
    rank.put(fill(slot, 1), kept=0)
    rank.put(fill(slot, 2), kept=1)
    dying = connect(server)
    fill(slot, 3)
    dying._ask(b"put ", slot.head.version, kept=2)
    dying._peer.sendall(slot.head.to_bytes() + b"half")
    assert dying._peer.recv(8) == bytes(8)  # the agent waits for the rest
    dying._peer.shutdown(socket.SHUT_RDWR)
    dying.close()
    replacement = connect(server)
    assert serials(replacement) == [2]
    replacement.put(fill(slot, 4), kept=2)
    assert serials(replacement) == [2, 4]
    replacement.close()


def test_a_new_process_of_a_rank_does_not_wait_for_the_silent_connection_of_the_old_one(
    server: PartnerServer, rank: PartnerConnection
) -> None:
    slot = fill(new_slot(), 3)
    silent = connect(server)
    silent._ask(b"put ", slot.head.version, kept=0)
    silent._peer.sendall(slot.head.to_bytes())
    assert silent._peer.recv(8) == bytes(8)  # the agent waits for the content
    rank.put(fill(new_slot(), 4), kept=0)
    assert serials(rank) == [4]
    silent.close()


def test_many_versions_need_no_more_descriptors_than_two(rank: PartnerConnection) -> None:
    slot = new_slot()
    counts = []
    for serial in range(1, 20):
        rank.put(fill(slot, serial, rank=907), kept=serial - 1)
        counts.append(len(open_files("/memfd:txl_partner_907 ")))
    assert counts[1:] == [4] * 18  # each of the two slots has its file and its mapping


def test_content_that_does_not_have_its_checksum_is_refused(rank: PartnerConnection) -> None:
    slot = fill(new_slot(), 1)
    rank.put(slot, kept=0)
    fill(slot, 2)
    slot.mapped(0)[HEAD_BYTES + 5] ^= 1
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        rank.put(slot, kept=1)
    assert serials(rank) == [1]


def test_an_agent_without_memory_says_so(rank: PartnerConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = fill(new_slot(), 1)

    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(slot_file.os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
        rank.put(slot, kept=0)
    assert not isinstance(raised.value, ConnectionError)


def test_a_version_that_is_not_there_is_an_error(rank: PartnerConnection) -> None:
    rank.put(fill(new_slot(), 1), kept=0)
    for version in (Version(2, 4, 3), Version(1, 4, 2), Version(1, 3, 3)):
        with pytest.raises(FileNotFoundError):
            rank.get(version, new_slot())


def test_a_stranger_gets_nothing(server: PartnerServer, rank: PartnerConnection) -> None:
    rank.put(fill(new_slot(), 1), kept=0)
    stranger = PartnerConnection(PartnerAddress("127.0.0.1", server.port, "0" * 16))
    with pytest.raises(ConnectionError):
        stranger.versions()
    stranger.close()


def test_an_agent_that_is_gone_is_a_connection_error() -> None:
    server = PartnerServer(unreachable_s=60.0)
    server.close()
    with pytest.raises(ConnectionError):
        connect(server)


def test_a_server_that_has_no_descriptor_left_for_a_moment_accepts_again(
    server: PartnerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, list[int]()

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        peer, address = accept(listener)
        if not failed:
            failed.append(errno.EMFILE)
            peer.close()
            raise OSError(errno.EMFILE, "no descriptor")
        return peer, address

    monkeypatch.setattr(socket.socket, "accept", failing)
    connect(server).close()  # ends the call of `accept` that had begun before
    with pytest.raises(OSError), closing(connect(server)) as connection:
        connection.versions()
    assert failed
    with closing(connect(server)) as connection:
        connection._peer.settimeout(30)
        assert connection.versions() == []


def test_a_slot_with_a_damaged_head_holds_no_version(server: PartnerServer, rank: PartnerConnection) -> None:
    damaged, whole = fill(new_slot(), 7), fill(new_slot(), 8)
    os.pwrite(damaged._file, b"\xff" * 8, 24)  # the first of the sizes
    assert damaged.head == NO_VERSION
    assert slot_to_replace([whole, damaged], kept=set()) is damaged
    server.offer([damaged, whole])
    rank.get(Version(8, 4, 3), new_slot())


def test_a_large_slot_has_little_more_memory_than_its_version() -> None:
    slot = fill(new_slot(), 7, content=bytes(20_000_000))
    assert os.fstat(slot._file).st_size - slot.head.num_bytes <= 1 << 20


def test_an_agent_that_is_frozen_is_an_error_when_its_versions_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partner, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = PartnerAddress("127.0.0.1", frozen.getsockname()[1], "a key")
        with closing(PartnerConnection(address)) as connection, pytest.raises(TimeoutError):
            connection.versions()


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [4, 4, 4], [3, 2], [1, 3, 2], [8] * 5])
def test_every_rank_has_its_partner_on_the_next_node(sizes: list[int]) -> None:
    nodes = [f"node{number}" for number, size in enumerate(sizes) for _ in range(size)]
    for rank, node in enumerate(nodes):
        partner = partner_of(rank, nodes)
        assert partner is not None
        assert nodes[partner] == f"node{(int(node[4:]) + 1) % len(sizes)}"
    if len(set(sizes)) == 1:
        assert sorted(partner_of(rank, nodes) or 0 for rank in range(len(nodes))) == list(range(len(nodes)))


def test_a_job_on_one_node_has_no_partners() -> None:
    assert partner_of(1, ["a", "a"]) is None


def test_the_oldest_version_that_need_not_stay_is_replaced() -> None:
    slots = [fill(new_slot(), serial) for serial in (4, 5, 6)]
    assert slot_to_replace(slots, kept={4, 6}) is slots[1]
    slots.append(new_slot())
    assert slot_to_replace(slots, kept={4}) is slots[3]
    assert slot_to_replace([slots[0], fill(new_slot(), 4)], kept={4}) is slots[0]
