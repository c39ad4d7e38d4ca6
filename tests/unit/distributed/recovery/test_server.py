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
        self.tell("hello", **place)

    def tell(self, kind: str, **values: Any) -> None:
        self.connection.send({"kind": kind, **self._place, **values})

    def receive(self) -> list[dict[str, Any]]:
        """Return the next messages. Waits for them."""
        messages: list[dict[str, Any]] = []
        while not messages:
            self.connection.peer.settimeout(30.0)
            messages = self.connection.receive()
        return messages


def test_a_fault_of_the_coordinator_ends_the_job_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server = CoordinatorServer(Broken(1, silent_s=6.0, max_in_row=3), unreachable_s=60.0)
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


def test_statuses_that_arrive_bring_no_judgements_of_their_own_and_losses_are_answered_at_once() -> None:
    coordinator = Counting(1, silent_s=6.0, max_in_row=3)
    begin_s = time.monotonic()
    server = CoordinatorServer(coordinator, unreachable_s=60.0)
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
