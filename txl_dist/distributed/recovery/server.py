"""The sockets of the coordinator: a thread in the agent of rank 0, to which all agents connect.

Each line that an agent sends carries a random key, which rank 0 shares over the process group.

    a foreign program, which has no key       its connection is dropped, without a line
    an agent whose message cannot be used     a line names the agent and the message. The agent stays, because its rank
                                              works. A loss that the message was about is noticed minutes later
    an agent whose greeting cannot be used    a line. Its connection is dropped, because it has no place in the job.
                                              With other settings than the job's it gets `end` before
    an agent that sends no lines of JSON      a line. Its connection is dropped, and the agent counts as lost
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
from typing import Any

from txl_dist.console.echo import echo
from txl_dist.distributed.connection import Connection, Message, end_when_unreachable, listen
from txl_dist.distributed.processes import process_of
from txl_dist.distributed.recovery.coordinator import Coordinator, MessageError, RefusedError
from txl_dist.distributed.recovery.printing import say
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
        """Number of the agent at each connection, or -1 before it has greeted."""
        self._reported: set[tuple[str, str]] = set()
        """Agents and kinds of messages that a line has named because they cannot be used."""
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

        A message that cannot be used is no such fault (`_pass_on`).
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
        """Pass the messages of a connection to the coordinator. A connection that fails is dropped."""
        try:
            messages = connection.receive()
        except OSError:
            self._drop(connection)
            return
        except ValueError as error:
            number = self._agents[connection]
            if number >= 0:
                say(f"agent {number} sends lines that are not JSON, so it counts as lost: {in_one_line(error)}")
            self._drop(connection)
            return
        for message in messages:
            if not self._pass_on(connection, message):
                self._drop(connection)
                return

    def _pass_on(self, connection: Connection, message: Message) -> bool:
        """Pass one message to the coordinator. Returns False if the connection must be dropped."""
        number = self._agents[connection]
        has_greeted = number >= 0
        has_key = message.get("key") == self.key
        if not has_greeted and not has_key:
            return False
        sender: Any = message.get("agent")
        if has_greeted:
            is_valid = has_key and sender == number
        else:
            is_valid = message.get("kind") == "hello" and type(sender) is int and sender >= 0
        try:
            if not is_valid:
                raise MessageError("the key or the number of the agent is wrong")
            address = connection.peer.getpeername()[0].removeprefix("::ffff:")  # IPv4 at a socket of IPv6
            self._coordinator.receive(sender, {"address": address, **message}, time.monotonic())
        except OSError:  # the peer is gone
            return False
        except MessageError as error:
            self._report(number if has_greeted else sender, message, error)
            if isinstance(error, RefusedError):
                with suppress(OSError):  # it is gone
                    connection.send({"kind": "end", "code": 2, "reason": str(error)})
            return has_greeted
        self._agents[connection] = sender
        return True

    def _report(self, number: object, message: Message, error: MessageError) -> None:
        """Print a line about a message that cannot be used, once for each agent and kind of message."""
        place = (repr(number), repr(message.get("kind")))
        if place in self._reported:
            return
        self._reported.add(place)
        if message.get("kind") == "hello":
            say(f"agent {number} was refused: {error}")
            return
        content = {name: value for name, value in message.items() if name != "key"}
        say(f"a message of agent {number} cannot be used: {error}. The message is {content!r:.200}")

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.peer)
        connection.peer.close()
        number = self._agents.pop(connection)
        if number >= 0:
            self._coordinator.lose_agent(number, time.monotonic())

    def _deliver(self) -> None:
        """Print the coordinator's lines, and send its messages. An agent that cannot be reached is lost."""
        for line in self._coordinator.lines:
            say(line)
        self._coordinator.lines.clear()
        self._drop_silent()  # first, because a send to them would wait
        while messages := self._coordinator.take_messages():
            for number, message, shared in messages:
                for connection in self._connections_of(number):
                    try:
                        connection.send(message, shared=shared)
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
