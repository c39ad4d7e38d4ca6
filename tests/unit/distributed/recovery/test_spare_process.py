"""An agent's view of its spare under a clock that the test moves: whoever is dead or silent is replaced, and none asked
for a replacement is forgotten."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from txl_dist.distributed.connection import Connection
from txl_dist.distributed.recovery.spare_process import ANSWER_S, ATTEMPTS, PING_EVERY_S, RETRY_S, START_S, SpareProcess


class FakeChild:
    """A process that ends when the test says so, or when it is killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        mine, self._peer = socket.socketpair()
        self.link, self._other = Connection(mine), Connection(self._peer)

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def received(self) -> list[Any]:
        """What the agent has asked since this was last read."""
        return [message.get("seat", message["kind"]) for message in self._other.receive()]

    def close(self) -> None:
        self.link.peer.close()
        self._peer.close()


class Node:
    """A `SpareProcess` with the processes that it has started."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.num_refused = 0
        """Number of the next starts that the system refuses."""
        self.spare = SpareProcess(self._start)

    def _start(self) -> FakeChild:
        if self.num_refused:
            self.num_refused -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.children.append(FakeChild(len(self.children) + 1))
        return self.children[-1]

    def connect(self, now_s: float) -> FakeChild:
        """The newest process has imported everything."""
        self.spare.connect(self.children[-1].link, now_s)
        return self.children[-1]


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for child in made.children:
        child.close()


def test_a_request_waits_for_the_start_of_the_spare(node: Node) -> None:
    node.spare.request(["seat 1"], 0.0)
    child = node.connect(3.0)
    assert child.received() == [["seat 1"]]
    node.spare.answer({"kind": "forked"}, 3.1)
    assert node.spare.look(3.1 + ANSWER_S / 2) == []
    assert len(node.children) == 1


def test_a_spare_that_dies_before_it_connects_is_followed_by_another_one_that_gets_the_request(node: Node) -> None:
    node.spare.ensure(0.0)
    node.children[0].code = -9
    node.spare.request(["seat 1"], 1.0)
    assert node.spare.look(1.0) == []
    assert node.connect(2.0).received() == [["seat 1"]]
    assert len(node.children) == 2


def test_a_spare_that_never_connects_is_killed_and_followed_by_another_one(node: Node) -> None:
    node.spare.request(["seat 1"], 0.0)
    node.spare.look(START_S - 1)
    assert node.children[0].code is None
    node.spare.look(START_S + 1)
    assert node.children[0].code == -9
    assert node.connect(START_S + 2).received() == [["seat 1"]]


def test_a_spare_that_does_not_answer_is_killed_and_the_next_one_gets_what_is_unanswered(node: Node) -> None:
    node.spare.request(["seat 1"], 0.0)
    node.spare.request(["seat 2"], 0.0)
    node.connect(1.0)
    node.spare.answer({"kind": "forked"}, 1.1)
    node.spare.look(1.2 + ANSWER_S)
    assert node.children[0].code == -9
    assert node.connect(20.0).received() == [["seat 2"]]


def test_an_idle_spare_that_is_frozen_is_noticed_before_it_is_needed(node: Node) -> None:
    node.spare.ensure(0.0)
    child = node.connect(1.0)
    node.spare.look(1.5 + PING_EVERY_S)
    assert child.received() == ["ping"]
    node.spare.answer({"kind": "pong"}, 2.0 + PING_EVERY_S)
    node.spare.look(2.5 + 2 * PING_EVERY_S)
    assert child.received() == ["ping"]
    node.spare.look(3.0 + 2 * PING_EVERY_S + ANSWER_S)
    assert child.code == -9
    assert len(node.children) == 2


def test_a_spare_whose_connection_ends_is_restarted(node: Node) -> None:
    node.spare.ensure(0.0)
    node.connect(1.0)
    node.spare.disconnect()
    node.spare.look(1.1)
    assert len(node.children) == 2
    assert node.children[0].code == -9


def test_a_spare_learns_that_its_agent_ends_before_it_is_killed(node: Node) -> None:
    node.spare.ensure(0.0)
    child = node.connect(1.0)
    node.spare.end()
    with pytest.raises(OSError):
        child.received()
    assert child.code == -9


def test_requests_are_given_back_after_too_many_failures_in_a_row(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.spare.request(["seat 1"], 0.0)
    given_back = []
    for number in range(ATTEMPTS):
        node.children[-1].code = 1
        given_back += node.spare.look(float(number))
    assert given_back == [["seat 1"]]
    assert len(node.children) == ATTEMPTS
    assert "(pid 3) has ended. It was number 3 in a row to fail" in capsys.readouterr().err
    node.spare.request(["seat 1"], 100.0)
    assert node.connect(101.0).received() == [["seat 1"]]


def test_an_answer_ends_a_row_of_failures(node: Node) -> None:
    node.spare.ensure(0.0)
    for number in range(2 * ATTEMPTS):
        node.connect(number)
        node.spare.answer({"kind": "pong"}, number)
        node.children[-1].code = -9
        assert node.spare.look(number) == []
    assert len(node.children) == 2 * ATTEMPTS + 1


def test_a_spare_that_the_system_does_not_start_is_tried_again_and_gets_the_request(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.num_refused = ATTEMPTS - 1
    node.spare.request(["seat 1"], 0.0)
    for number in range(1, ATTEMPTS):
        node.spare.ensure(number * 2 * RETRY_S)
        assert node.spare.look(number * 2 * RETRY_S) == []
    assert node.connect(10.0).received() == [["seat 1"]]
    assert os.strerror(errno.EAGAIN) in capsys.readouterr().err


def test_a_request_is_given_back_if_the_system_starts_no_spare(node: Node) -> None:
    node.num_refused = ATTEMPTS
    node.spare.request(["seat 1"], 0.0)
    looks = [node.spare.look(number * 2 * RETRY_S) for number in range(1, ATTEMPTS + 1)]
    assert looks == [[]] * (ATTEMPTS - 1) + [[["seat 1"]]]
    node.spare.request(["seat 1"], 100.0)
    assert node.connect(101.0).received() == [["seat 1"]]


def test_a_killed_spare_that_does_not_end_delays_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.spare.request(["seat 1"], 0.0)
    monkeypatch.setattr(node.children[0], "kill", lambda: None)  # as if it were inside the kernel
    node.spare.look(START_S + 1)
    assert node.connect(START_S + 2).received() == [["seat 1"]]
