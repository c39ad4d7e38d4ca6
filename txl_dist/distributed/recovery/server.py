"""The sockets of the coordinator: a thread in the agent of rank 0, to which all agents connect.

Each line that an agent sends carries a random key, which rank 0 shares over the process group. A connection with
another key is dropped.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

from txl_dist.console.echo import echo
from txl_dist.distributed.connection import Connection, end_when_unreachable, listen
from txl_dist.distributed.processes import process_of
from txl_dist.distributed.recovery.coordinator import Coordinator
from txl_dist.errors import in_one_line

TICK_S = 0.2
"""Seconds between two judgements of the coordinator. Each one looks at all ranks."""
PAUSED_S = 1.0
"""Seconds between two turns of the thread above which this process was stopped or had no processor."""


class CoordinatorServer:
    """Thread that runs the coordinator until `close`."""

    def __init__(self, coordinator: Coordinator, *, unreachable_s: float) -> None:
        """Start the thread. A connection whose agent was unreachable for `unreachable_s` seconds ends."""
        self.key = secrets.token_hex(8)
        self._coordinator = coordinator
        self._unreachable_s = unreachable_s
        self._server = listen()
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._agents: dict[Connection, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def close(self, *, grace_s: float) -> None:
        """End the thread after all agents have disconnected, or after `grace_s` seconds.

        Silent agents of this node are killed.
        """
        end_s = time.monotonic() + grace_s
        while any(number >= 0 for number in list(self._agents.values())) and time.monotonic() < end_s:
            time.sleep(0.02)
        self._closing.set()
        self._thread.join(1.0)
        for process in map(process_of, self._coordinator.silent_here):
            if process.lives():  # else its pid may be that of another process now
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def _run(self) -> None:
        """Serve the agents. A fault of the coordinator ends the job, because nobody would notice a later loss.

        Faults that a malformed message can cause are no such faults. They cost that agent (`_hear`).
        """
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  whatever it is, the job must not go on without a coordinator
            with suppress(OSError):  # the terminal is gone
                echo(traceback.format_exc(), to=sys.stderr, flush=True)
            self._coordinator.end(f"the coordinator of recovery has failed ({in_one_line(error)})")
            self._deliver()  # at once, because the same fault may come again
            self._serve()

    def _serve(self) -> None:
        last_s = next_tick_s = time.monotonic()
        while not self._closing.is_set():
            ready = self._selector.select(max(0.0, next_tick_s - time.monotonic()))
            now_s = time.monotonic()
            if now_s > last_s + PAUSED_S:
                self._coordinator.excuse(now_s - last_s, now_s)
            last_s = now_s
            for key, _ in ready:
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._hear(key.data)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._coordinator.tick(now_s)
            self._deliver()

    def _accept(self) -> None:
        with suppress(OSError):  # the peer is gone already, or there is no descriptor left
            peer, _ = self._server.accept()
            end_when_unreachable(peer, after_s=self._unreachable_s)
            connection = Connection(peer)
            self._agents[connection] = -1
            self._selector.register(peer, selectors.EVENT_READ, connection)

    def _hear(self, connection: Connection) -> None:
        """Pass the messages of an agent to the coordinator. A connection that fails is dropped."""
        try:
            for message in connection.receive():
                if message.get("key") != self.key:
                    raise ValueError("another key")
                number = int(message["agent"])
                if message["kind"] != "hello" and number != self._agents[connection]:
                    raise ValueError("another agent")
                address = connection.peer.getpeername()[0].removeprefix("::ffff:")  # IPv4 at a socket of IPv6
                self._coordinator.receive(number, {"address": address, **message}, time.monotonic())
                self._agents[connection] = number
        except (OSError, ValueError, TypeError, KeyError) as error:
            number = self._agents[connection]
            if number >= 0 and not isinstance(error, OSError):
                with suppress(OSError):  # the terminal is gone
                    said = f"a message of agent {number} cannot be used, so it counts as lost: {in_one_line(error)}"
                    echo(f"txl: recovery: {said}", to=sys.stderr, flush=True)
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.peer)
        connection.peer.close()
        number = self._agents.pop(connection)
        if number >= 0:
            self._coordinator.lose_agent(number, time.monotonic())

    def _deliver(self) -> None:
        """Print the coordinator's lines, and send its messages. An agent that cannot be reached is lost."""
        for line in self._coordinator.lines:
            with suppress(OSError):  # the terminal is gone
                echo(f"txl: recovery: {line}", to=sys.stderr, flush=True)
        self._coordinator.lines.clear()
        self._drop_silent()  # first, because a send to them would wait
        while messages := self._coordinator.take_messages():
            for number, message in messages:
                for connection in self._connections_of(number):
                    try:
                        connection.send(message)
                    except OSError:
                        self._drop(connection)
            self._drop_silent()

    def _drop_silent(self) -> None:
        """Close the connections of the agents that the coordinator has given up."""
        while self._coordinator.dropped:
            for connection in self._connections_of(self._coordinator.dropped.pop(0)):
                self._drop(connection)

    def _connections_of(self, number: int) -> list[Connection]:
        return [connection for connection, agent in self._agents.items() if agent == number]
