"""The sockets of the coordinator: what agents receive, and what happens when the coordinator itself fails."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from txl_dist.distributed.connection import Connection, Message
from txl_dist.distributed.recovery.coordinator import Coordinator
from txl_dist.distributed.recovery.server import TICK_S, CoordinatorServer
from txl_dist.errors import HANG


class Broken(Coordinator):
    """Coordinator with a fault in its judgements."""

    def tick(self, now_s: float) -> None:
        """Fail as soon as all agents are known."""
        if self._is_complete and not self.is_ended:
            raise AssertionError("a fault of the coordinator")


class Counting(Coordinator):
    """Coordinator that counts its judgements and the statuses that it gets."""

    num_ticks = 0
    num_statuses = 0

    def tick(self, now_s: float) -> None:
        """Count a judgement."""
        self.num_ticks += 1
        super().tick(now_s)

    def receive(self, number: int, message: Message, now_s: float) -> None:
        """Count a status."""
        super().receive(number, message, now_s)
        self.num_statuses += message["kind"] == "status"


class Agent:
    """Connection of an agent to the coordinator."""

    def __init__(self, server: CoordinatorServer, number: int) -> None:
        self._place = {"key": server.key, "agent": number}
        self.connection = Connection(socket.create_connection(("127.0.0.1", server.port)))
        place = {"host": "a", "node": "a", "seat": [f"seat {number}"], "pid": 1, "process": [], "partner": []}
        self.tell("hello", **place, settings_hash="", code="")

    def tell(self, kind: str, **values: Any) -> None:
        self.connection.send({"kind": kind, **self._place, **values})

    def receive(self) -> list[dict[str, Any]]:
        """Return the next messages. Waits for them."""
        messages: list[dict[str, Any]] = []
        while not messages:
            self.connection.peer.settimeout(30.0)
            messages = self.connection.receive()
        return messages

    def kinds_until(self, last: str) -> list[str]:
        """Return the kinds of the next messages, up to one of the kind `last`. Waits for it."""
        kinds: list[str] = []
        while last not in kinds:
            kinds += [message["kind"] for message in self.receive()]
        return kinds


def test_a_fault_of_the_coordinator_ends_the_job_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server = CoordinatorServer(Broken(1, silent_s=60.0, max_in_row=3), unreachable_s=600.0)
    agent = Agent(server, 0)
    (end,) = agent.receive()
    assert (end["kind"], end["code"]) == ("end", HANG)
    assert "AssertionError: a fault of the coordinator" in end["reason"]
    agent.connection.peer.close()
    server.close(grace_s=60.0)
    errors = capfd.readouterr().err
    assert "Traceback" in errors
    assert "the job ends: the coordinator of recovery has failed" in errors
    assert "coordinator" not in [thread.name for thread in threading.enumerate()]


STATUS = [0.1, 0.1, 60.0, 5, "step", False]


def closed_by_peer(peer: socket.socket) -> bool:
    """Return whether the other end closes a connection. Waits for what it does."""
    peer.settimeout(30.0)
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b'{"kind": "dance"}',
        b'{"kind": "hello", "key": "of another job", "agent": 0}',
        b'{"kind": "status", "key": ["x"], "agent": {}}',
    ],
)
def test_a_foreign_program_is_dropped_without_a_line_and_the_job_goes_on(
    line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    server = CoordinatorServer(Coordinator(1, silent_s=60.0, max_in_row=3), unreachable_s=600.0)
    agent = Agent(server, 0)
    with socket.create_connection(("127.0.0.1", server.port)) as foreign:
        foreign.sendall(line + b"\n")
        assert closed_by_peer(foreign)
    agent.tell("died", cause="SIGKILL", status=STATUS)
    kinds = agent.kinds_until("replace")
    assert "end" not in kinds
    agent.connection.peer.close()
    server.close(grace_s=60.0)
    assert "cannot be used" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("dance", {}, "ValueError: the message 'dance' is unknown"),
        ("ready", {"port": 7}, "KeyError: 'generation'"),
        ("stepped", {"generation": None, "step": 3}, "TypeError"),
        ("died", {"cause": "SIGKILL", "status": [1]}, "ValueError"),
        ("status", {"status": STATUS, "agent": 1}, "the number of the agent is wrong"),
    ],
)
def test_an_agent_whose_message_cannot_be_used_stays_and_one_line_names_it_and_the_message(
    kind: str, values: dict[str, Any], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator = Counting(1, silent_s=60.0, max_in_row=3)
    server = CoordinatorServer(coordinator, unreachable_s=600.0)
    agent = Agent(server, 0)
    for _ in range(3):
        agent.connection.send({"kind": kind, "key": server.key, "agent": 0, **values})
    agent.tell("died", cause="SIGKILL", status=STATUS)
    kinds = agent.kinds_until("replace")
    assert kinds == ["plan", "replace"]
    assert coordinator.generation == 2
    agent.connection.peer.close()
    server.close(grace_s=60.0)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "cannot be used" in line]
    assert "agent 0" in line
    assert problem in line
    assert repr(kind) in line
    assert server.key not in line


def test_an_agent_that_sends_no_json_counts_as_lost(capfd: pytest.CaptureFixture[str]) -> None:
    coordinator = Counting(2, silent_s=60.0, max_in_row=3)
    server = CoordinatorServer(coordinator, unreachable_s=600.0)
    agents = [Agent(server, number) for number in (0, 1)]
    for agent in agents:
        agent.tell("status", status=STATUS)
    end_s = time.monotonic() + 60
    while coordinator.num_statuses < 2 and time.monotonic() < end_s:
        time.sleep(0.001)
    agents[1].connection.peer.sendall(b"no message\n")
    (end,) = agents[0].receive()
    assert end["kind"] == "end"
    assert "the agent of rank 1 on a was lost" in end["reason"]
    for agent in agents:
        agent.connection.peer.close()
    server.close(grace_s=60.0)
    assert "agent 1 sends lines that are not JSON, so it counts as lost" in capfd.readouterr().err


def test_a_second_agent_with_the_same_number_is_refused_and_the_first_one_stays(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = CoordinatorServer(Coordinator(1, silent_s=60.0, max_in_row=3), unreachable_s=600.0)
    first = Agent(server, 0)
    for _ in range(3):
        assert closed_by_peer(Agent(server, 0).connection.peer)
    first.tell("died", cause="SIGKILL", status=STATUS)
    first.kinds_until("replace")
    first.connection.peer.close()
    server.close(grace_s=60.0)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "already connected" in line]
    assert line.endswith("agent 0 was refused: ValueError: agent 0 is already connected")


class Faulty(Coordinator):
    """Coordinator with a fault that looks like that of a malformed message."""

    def _start(self, number: int, pid: int, now_s: float) -> None:
        raise KeyError("a fault of the coordinator")


def test_an_error_of_the_coordinator_is_none_of_the_message_although_it_is_of_the_same_type(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = CoordinatorServer(Faulty(1, silent_s=60.0, max_in_row=3), unreachable_s=600.0)
    agent = Agent(server, 0)
    agent.tell("started", pid=5)
    (end,) = agent.receive()
    assert end["kind"] == "end"
    assert "KeyError: 'a fault of the coordinator'" in end["reason"]
    agent.connection.peer.close()
    server.close(grace_s=60.0)
    assert "Traceback" in capfd.readouterr().err


def test_statuses_that_arrive_bring_no_judgements_of_their_own_and_losses_are_answered_at_once() -> None:
    coordinator = Counting(1, silent_s=60.0, max_in_row=3)
    begin_s = time.monotonic()
    server = CoordinatorServer(coordinator, unreachable_s=600.0)
    agent = Agent(server, 0)
    status = [0.1, 0.1, 60.0, 5, "step", False]
    for number in range(100):
        agent.tell("status", status=status)
        while coordinator.num_statuses <= number and time.monotonic() < begin_s + 60:
            time.sleep(0.001)
    agent.tell("died", cause="SIGKILL", status=status)
    kinds: list[str] = []
    while len(kinds) < 2:
        kinds += [message["kind"] for message in agent.receive()]
    assert kinds == ["plan", "replace"]
    assert coordinator.num_ticks <= 2 + (time.monotonic() - begin_s) / TICK_S
    agent.connection.peer.close()
    server.close(grace_s=60.0)
