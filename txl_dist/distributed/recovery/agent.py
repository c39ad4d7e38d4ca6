"""The agent of a rank: the process that the launcher started. Its child is the rank, which it replaces if it dies.

    launcher --> agent --> rank            the words of `txl train`, with the seat in TXL_RECOVERY_SEAT
                       --> spare           only at local rank 0. It forks a replacement for any rank of the node

Agents of spare nodes have no rank at the start. They find the job through a file in the run directory, and get a rank
when a node is lost. An agent that is started again while the job waits for it does the same.

An agent on another node than the coordinator has a lease: it kills its rank when the coordinator has confirmed no
status of it for `recover.silent_s`. So a node that was cut off writes nothing after its ranks were given away.

The agent holds what must outlive a rank: the rank's seat. It passes stop signals on to its rank, and it exits with the
exit code of its rank. So a launcher that watches the agent sees a rank that works until the run ends. The agent itself
imports no torch and trains nothing.

Limitations: the copies in an agent end with it. If another agent takes the rank, the run continues from the copies of a
partner, or else from the last checkpoint. If the agent of rank 0 is killed, the job ends.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from txl_dist.artifacts import STOP
from txl_dist.distributed.connection import Connection, Message, end_when_unreachable
from txl_dist.distributed.processes import ProcessId, process_id
from txl_dist.distributed.recovery.coordinator import KILLED_S, Coordinator
from txl_dist.distributed.recovery.job_file import JobAddress, StoreWatch, find_job, publish_job, withdraw_job
from txl_dist.distributed.recovery.partner import PartnerServer
from txl_dist.distributed.recovery.printing import say
from txl_dist.distributed.recovery.seat import CONFIG_COPY, SEAT, AgentOptions, Seat, node_name, place_variables
from txl_dist.distributed.recovery.server import CoordinatorServer
from txl_dist.distributed.recovery.slot_file import SlotFile
from txl_dist.distributed.recovery.spare_process import Child, SpareProcess
from txl_dist.distributed.recovery.status import StatusPage
from txl_dist.distributed.recovery.verdicts import AGENT_LOST, CUT_OFF, Loss
from txl_dist.errors import HANG
from txl_dist.version import code_version

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that an agent passes on to its rank."""
REPORT_EVERY_S = 0.25
"""Seconds between two reports of the rank's status to the coordinator. The agent acts on a deadline at most this much
later, and on the end of its lease at once."""
CAUSE_S = 1.0
"""Seconds to wait for the exit status of a process whose connection has ended."""
END_S = 10.0
"""Seconds that a rank has to end by itself after the job was ended. Then it is killed."""
DUMP_S = 0.5
"""Seconds that a rank that hangs has to write its stack traces before it is killed."""
NODE_ENDS_S = 10.0
"""Seconds within which a launcher ends the other agents of a node that has lost one. DeepSpeed looks once a second."""
BEGIN_S = 30.0
"""Seconds in which a replacement must connect after it was forked. Then it is killed."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks for the file STOP."""
JOIN_EVERY_S = 1.0
"""Seconds between two attempts of an agent without a rank to find the job."""
CONNECT_S = 10.0
"""Largest number of seconds to wait for a connection to the coordinator."""
FOUND_WITHIN_S = 30.0
"""Seconds in which a network file system shows the file of a job to the agents of spare nodes."""
UNREACHABLE = 10
"""A connection ends when its other end was unreachable for `recover.silent_s` times this number."""
_PR_SET_PDEATHSIG = 1


Start = Callable[[Seat], Child]
"""Function that starts a process with a seat: the process of a rank, or a spare."""


class Agent:
    """Agent of one rank. `run` returns the exit code when the rank has ended.

    An agent is idle while the job needs no rank of it. Its slots may still hold state that the job needs.
    """

    def __init__(self, start: Start, options: AgentOptions) -> None:
        """Make the seat and start the rank. `start` starts the process of a rank or of a spare."""
        self._start = start
        self._number = int(os.environ.get("RANK", "0"))
        self._is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        self._options = options
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        num_ranks = world_size - options.spare_nodes * local_size
        self._server = None
        unreachable_s = UNREACHABLE * options.silent_s
        if self._number == 0:
            self._server = CoordinatorServer(
                Coordinator(
                    num_ranks,
                    silent_s=options.silent_s,
                    max_in_row=options.max_in_row,
                    on_loss=options.on_loss,
                    max_ranks=options.max_ranks,
                ),
                unreachable_s=unreachable_s,
            )
        self._partner_server = PartnerServer(unreachable_s=unreachable_s) if options.copies == "partner" else None
        self._seat = self._make_seat()
        if self._partner_server is not None:
            self._partner_server.offer([SlotFile(os.dup(slot)) for slot in self._seat.slots])
        self._page = StatusPage(self._seat.status)
        self._page.clear()
        self._listener = _listen_at(self._seat.address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._rank_link: Connection | None = None
        self._coordinator: Connection | None = None
        self._key = ""
        self._lease_s: float | None = None
        """Time of the newest status that the coordinator has confirmed, or None if the coordinator is on this node."""
        self._pid = 0
        self._process: ProcessId | None = None
        """Identity of the process with this pid, once it has connected or was forked."""
        self._exit_status: int | None = None
        """Exit code of the rank's process, negative for a signal. None while the process runs."""
        self._closed_s: float | None = None
        """Time at which the connection of the rank ended."""
        self._has_joined = False
        """Whether a process of the rank has connected to this agent."""
        self._is_leaving = False
        self._announced_code = 0
        """Exit code with which the rank has said that it will end, or 0."""
        self._is_idle = False
        self._is_welcome = False
        """Whether a running job has taken this agent in."""
        self._is_refused = False
        """Whether a running job has refused this agent."""
        self._job: JobAddress | None = None
        """Address of the coordinator in this agent, once the run directory has it."""
        self._plan: Message | None = None
        self._deadline_s: float | None = None
        """Time at which the rank is killed, because the job has ended."""
        self._end_code = HANG
        """Exit code of this agent if the job has ended."""
        self._spare = SpareProcess(lambda: self._start(self._seat._replace(is_spare=True)))
        self._begin_by_s: float | None = None
        """Time by which a replacement that was forked must connect."""
        self._cause = ""
        """Reason for which this agent has killed the rank's process, or an empty text."""
        self._node_ends_by_s = 0.0
        """Time until which a SIGTERM comes from a launcher that ends this node, because it has lost an agent."""
        self._is_node_ending = False
        self._stop: tuple[int, int] | None = None
        """Last stop signal, and the process that it was sent to."""
        self._stop_s = -math.inf
        """Time of the last SIGTERM."""
        self._told_stop = ""
        """Last request to stop that the coordinator knows, or an empty text."""
        self._next_look_s = 0.0
        self._stop_file: Path | None = None
        """The file STOP, if this agent has found it."""
        self._next_report_s = 0.0
        self._lock = ""
        """Path of the run's lock if this rank has entered it. The agent keeps it fresh while it has no process."""
        self._child: Child | None = None
        self._wake_by_signals()
        self._next_join_s = 0.0
        self._join_by_s = time.monotonic() + options.join_s
        self._store_by_s = time.monotonic() + options.join_s / 2
        """Time by which the ranks must have begun to meet, for an agent of a spare node."""
        self._store = StoreWatch(os.environ)
        self._is_idle = True  # a plan that arrives in `_rejoin` may change it
        if self._number < num_ranks and not self._rejoin() and self._deadline_s is None:
            self._is_idle = False
            os.environ["WORLD_SIZE"] = str(num_ranks)
            self._child = self._start(self._seat)
            self._pid = self._child.pid
            self._forward_again()

    def run(self) -> int:
        """Serve the rank and the coordinator until the rank has ended. Returns the exit code."""
        code = None
        while code is None:
            due_s = min(self._next_report_s, self._lease_ends_s)
            for key, _ in self._selector.select(max(0.0, due_s - time.monotonic())):
                key.data(key.fileobj)
            now_s = time.monotonic()
            self._report(now_s)
            self._look_at_lease(now_s)
            self._look_at_spare(now_s)
            self._look_at_stop(now_s)
            if self._is_idle and not self._is_welcome and self._deadline_s is None:
                self._keep_joining(now_s)
            if self._deadline_s is not None and now_s > self._deadline_s:
                self._signal(signal.SIGKILL)
            code = HANG if self._is_node_ending else self._look_at_rank(now_s)
        signal.set_wakeup_fd(-1)  # else Python would write to a closed socket when a child ends
        if self._is_node_ending and self._is_first_of_node:
            say(f"the agents on {socket.gethostname()} end, because the launcher ends a node that has lost an agent")
        if self._coordinator is not None:
            self._coordinator.peer.close()
        if self._stop_file is not None and code:
            self._stop_file.unlink(missing_ok=True)  # the job has obeyed, and the file must not stop the next one
        if self._job is not None:
            withdraw_job(Path(self._options.run_dir), self._job)
            with suppress(OSError):  # a run that was refused leaves no folder
                Path(self._options.run_dir).rmdir()
        if self._partner_server is not None:
            self._partner_server.close()
        if self._server is not None:
            self._server.close(grace_s=END_S if code else self._options.silent_s + END_S)
        self._spare.end()
        return code

    def _make_seat(self) -> Seat:
        files = [os.memfd_create(f"txl_{name}", os.MFD_CLOEXEC) for name in ("status", "slot0", "slot1", "slot2")]
        return Seat(
            address=f"txl-recovery-{os.getpid()}-{secrets.token_hex(8)}",
            agent=os.getpid(),
            status=files[0],
            slots=files[1:],
            coordinator=[str(self._server.port), self._server.key] if self._server else [],
            variables=place_variables(os.environ),
            partner=[str(self._partner_server.port), self._partner_server.key] if self._partner_server else [],
            silent_s=self._options.silent_s,
            code=code_version(),  # of this process, as which the rank and the spare import their modules
            plugins=self._options.plugins,
        )

    def _wake_by_signals(self) -> None:
        """Handle stop signals, and make `run` continue at once after them and after the end of a child."""
        for number in SIGNALS:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # Python only writes to the socket for signals with a handler
        reader, self._waker = socket.socketpair()
        reader.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, lambda _: reader.recv(4096))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the rank. It may also be that of a launcher that ends the whole node after the loss of an
        agent: then the job continues elsewhere, so the rank is killed before it can take part in a stop of the job.
        """
        if number == signal.SIGTERM:
            self._stop_s = time.monotonic()
            if self._stop_s < self._node_ends_by_s:
                self._is_node_ending = True
                self._signal(signal.SIGKILL)
                return
        self._stop = (number, self._pid)
        self._signal(number)
        if self._is_idle and not self._is_welcome:
            self._end({"kind": "end", "code": 128 + number})

    def _forward_again(self) -> None:
        """Pass on a stop signal that came while the rank had another process, or none."""
        if self._stop is not None and self._stop[1] != self._pid:
            self._forward(self._stop[0], None)

    def _signal(self, number: int) -> None:
        """Send a signal to the rank's process, if there is one."""
        if self._pid > 0:  # 0 and -1 would mean other processes
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a process of the same user: the rank, a replacement, the spare, or the parent of a replacement."""
        try:
            peer, _ = listener.accept()
        except OSError:  # the peer is gone already, or there is no descriptor left
            return
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            peer.close()
            return
        connection = Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ, lambda _: self._hear(connection))

    def _hear(self, connection: Connection) -> None:
        """Act on the messages of a process of this node."""
        try:
            messages = connection.receive()
        except (OSError, ValueError):
            self._disconnect(connection)
            if connection is self._rank_link:
                self._rank_link = None
                if self._pid > 0:  # else its end was noticed before
                    self._closed_s = time.monotonic()
            elif self._spare.is_at(connection):
                self._spare.disconnect()
            return
        for message in messages:
            self._act(connection, message)

    def _hear_rest(self) -> None:
        """Act on what the rank's process had sent before it ended, and close its connection."""
        while self._rank_link is not None and _is_readable(self._rank_link.peer, 0.0):
            self._hear(self._rank_link)
        if self._rank_link is not None:  # a child of that process holds the other end
            self._disconnect(self._rank_link)
            self._rank_link = None

    def _disconnect(self, connection: Connection) -> None:
        """Close the connection to a process of this node."""
        self._selector.unregister(connection.peer)
        connection.peer.close()

    def _act(self, connection: Connection, message: Message) -> None:
        """Act on one message of a process of this node."""
        kind = message["kind"]
        now_s = time.monotonic()
        if kind == "rank" and self._rank_link is not None:
            self._disconnect(connection)  # a second replacement, which ends without its agent
        elif kind == "rank":
            self._rank_link = connection
            self._has_joined = True
            self._forget_process()
            self._pid = int(message["pid"])
            self._process = process_id(self._pid)
            self._tell_coordinator({"kind": "started", "pid": self._pid})
            if self._plan is not None and self._plan["rank"] >= 0:
                self._tell_rank(self._plan)
        elif kind == "spare":
            self._spare.connect(connection, now_s)
        elif self._spare.is_at(connection):
            self._spare.answer(message, now_s)
        elif kind == "pong" or (kind == "forked" and "pid" not in message):
            return  # the late answer of a spare that was killed
        elif kind == "forked":  # from the spare that has forked this agent's rank
            if self._rank_link is None:  # else the replacement itself was faster
                self._pid = int(message["pid"])
                self._process = process_id(self._pid)
                self._begin_by_s = now_s + BEGIN_S
        elif kind == "exited":
            if message["pid"] == self._pid:
                self._exit_status = message["status"]
        elif kind == "coordinator":
            try:
                self._connect(message)
            except OSError as error:
                address = f"{message['host']}:{message['port']}"
                reason = (
                    f"the agent of rank {self._number} on {socket.gethostname()} cannot connect to that of rank 0 at "
                    f"{address}: {error}. Allow TCP connections between all nodes, or set recover.spares to 0"
                )
                say(f"the job ends: {reason}")
                self._end({"kind": "end", "code": HANG, "reason": reason})
        elif kind == "leaving":
            self._is_leaving = True
            self._announced_code = int(message["code"])
        elif kind == "lock":
            self._lock = message["path"]
            joinable = self._options.spare_nodes > 0 or self._options.on_loss == "wait"
            if self._server is not None and self._job is None and joinable:
                self._publish()
        else:
            if kind == "stepped" and self._is_first_of_node:
                self._spare.ensure(now_s)
            if kind == "failed":
                self._announced_code = int(message["code"])
            if kind == "ready":
                self._forward_again()
            self._tell_coordinator(message)

    def _connect(self, message: Message) -> None:
        """Connect to the coordinator at `host` and `port` of the message. Raises OSError if that fails."""
        peer = socket.create_connection((message["host"], int(message["port"])), timeout=CONNECT_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_unreachable(peer, after_s=UNREACHABLE * self._options.silent_s)
        coordinator = Connection(peer)
        hello = {"kind": "hello", "seat": self._seat, "pid": self._pid, "process": process_id()}
        hello |= {"partner": self._seat.partner}
        job = {"settings_hash": self._options.settings_hash, "code": self._seat.code + self._seat.plugins}
        place = {"host": socket.gethostname(), "node": node_name()}
        coordinator.send({"key": message["key"], "agent": self._number, **hello, **job, **place})
        other, own = (address.removeprefix("::ffff:") for address, *_ in (peer.getpeername(), peer.getsockname()))
        is_remote = other not in (own, "127.0.1.1")  # as which Debian knows a machine's own name
        self._lease_s = time.monotonic() if is_remote else None
        self._key = message["key"]
        self._coordinator = coordinator
        self._selector.register(peer, selectors.EVENT_READ, self._obey)

    def _tell_coordinator(self, message: Message) -> None:
        """Send a message to the coordinator. If it is gone, the job ends."""
        if self._coordinator is None:
            return
        try:
            self._coordinator.send({"key": self._key, "agent": self._number, **message})
        except OSError:
            self._lose_coordinator()

    def _tell_rank(self, message: Message) -> None:
        if self._rank_link is not None:
            with suppress(OSError):  # it has just died, which `_look_at_rank` notices
                self._rank_link.send(message)

    def _obey(self, peer: socket.socket) -> None:
        """Act on the coordinator's messages. It may have been lost before, in the same turn of `run`."""
        if self._coordinator is None:
            return
        try:
            messages = self._coordinator.receive()
        except (OSError, ValueError):
            self._lose_coordinator()
            return
        for message in messages:
            self._follow(message)

    def _follow(self, message: Message) -> None:
        """Act on one message of the coordinator."""
        kind = message["kind"]
        if kind == "welcome":
            self._is_welcome = True
            if self._is_first_of_node:
                self._spare.ensure(time.monotonic())
        elif kind == "heard":
            self._lease_s = message["sent_s"]
        elif kind == "plan":
            self._is_welcome = True  # an agent that has lost its rank does not look for the job again
            losses = [Loss(*loss) for loss in message["losses"]]
            here = socket.gethostname()
            if self._lease_s is not None and any(loss.host == here and loss.cause == AGENT_LOST for loss in losses):
                self._node_ends_by_s = time.monotonic() + NODE_ENDS_S  # not on the node of rank 0, where the job ends
                if self._stop_s > time.monotonic() - NODE_ENDS_S:  # the launcher was faster than this plan
                    self._is_node_ending = True
                    self._signal(signal.SIGKILL)
                    return
            self._plan = message
            self._is_idle = message["rank"] < 0
            if self._is_idle:
                self._end_rank()
            else:
                self._tell_rank(message)
        elif kind == "meet":
            self._tell_rank(message)
        elif kind == "replace":
            self._spare.request(message["seat"], time.monotonic())
        elif kind == "kill":
            if message["dump"]:
                self._signal(signal.SIGABRT)
                time.sleep(DUMP_S)
            self._signal(signal.SIGKILL)
        elif kind == "stop":  # from an agent that has no rank
            self._stop = (signal.SIGTERM, self._pid)
            self._signal(signal.SIGTERM)
        elif kind == "end":
            if self._is_idle and not self._is_welcome:
                reason = message["reason"] or "the run is done"
                say(f"agent {self._number} on {socket.gethostname()} cannot join the job: {reason}")
            self._end(message)

    def _rejoin(self) -> bool:
        """Take the place of a lost agent in a job that waits for it. Returns whether there is such a job.

        The job may still believe that the lost agent lives. So a refusal is final only after a while.
        """
        end_s = time.monotonic() + 2 * self._options.silent_s
        while self._options.on_loss == "wait" and not self._join():
            if self._deadline_s is not None or not self._is_refused or time.monotonic() > end_s:
                return False
            time.sleep(JOIN_EVERY_S)
        return self._is_welcome

    def _join(self) -> bool:
        """Connect to the coordinator of a running job that can use this agent. Returns whether there is one."""
        self._is_refused = False
        job = find_job(Path(self._options.run_dir)) if self._number else None
        if job is None:
            return False
        try:
            self._connect({"host": job.host, "port": job.port, "key": job.key})
        except OSError:
            return False
        assert self._coordinator is not None
        peer = self._coordinator.peer
        self._selector.unregister(peer)
        _is_readable(peer, CONNECT_S)
        try:
            messages = self._coordinator.receive()
        except (OSError, ValueError):
            messages = []
        for message in messages:
            self._follow(message)
        if self._is_welcome:
            self._selector.register(peer, selectors.EVENT_READ, self._obey)
        else:
            self._is_refused = True
            peer.close()
            self._coordinator = None
            self._lease_s = None
        return self._is_welcome

    def _keep_joining(self, now_s: float) -> None:
        """Look for the job once a second, in the agent of a spare node. The agent ends if there is none for long."""
        if now_s > self._join_by_s:
            how, code = f"found no running job in {self._options.run_dir}", HANG
            if self._store.has_ended:  # the ranks have said why, and have the exit code
                how, code = "ends, because the job has ended before it had begun", 0
            say(f"this spare node {how}")
            self._end({"kind": "end", "code": code})
        elif now_s > self._next_join_s:
            self._next_join_s = now_s + JOIN_EVERY_S
            if self._join():
                self._store.close()
                return
            self._store.look()
            if self._store.has_ended or (now_s > self._store_by_s and not self._store.has_begun):
                self._join_by_s = min(self._join_by_s, now_s + FOUND_WITHIN_S)

    def _publish(self) -> None:
        """Write the address of the coordinator into the run directory, for agents that join later."""
        assert self._server is not None
        self._job = JobAddress(os.environ.get("MASTER_ADDR", "127.0.0.1"), self._server.port, self._server.key)
        try:
            publish_job(Path(self._options.run_dir), self._job)
        except OSError as error:
            say(f"no agent can join this job later: {error}")

    def _end_rank(self) -> None:
        """Kill the process of the rank, because the job continues without this rank. Its slots stay."""
        self._signal(signal.SIGKILL)
        if self._child is not None and self._pid == self._child.pid:
            end_s = time.monotonic() + CAUSE_S
            while self._child.poll() is None and time.monotonic() < end_s:  # it may be inside the kernel, without end
                time.sleep(0.01)
        self._forget_process()
        self._page.clear()

    def _forget_process(self) -> None:
        """Forget the rank's process, and what was noticed about its end."""
        self._pid = 0
        self._process = None
        self._exit_status = None
        self._closed_s = None
        self._begin_by_s = None
        self._cause = ""

    def _lose_coordinator(self) -> None:
        """End the rank, because no one can replace it any more. At the end of a run the rank ends by itself."""
        assert self._coordinator is not None
        self._selector.unregister(self._coordinator.peer)
        self._coordinator.peer.close()
        self._coordinator = None
        reason = "the connection to the agent of rank 0 was lost"
        if (self._number == 1 or self._is_first_of_node) and not self._is_leaving and self._deadline_s is None:
            how = "If the job has ended too, the same command continues from the last checkpoint"
            say(f"the agents on {socket.gethostname()} end: {reason}. {how}")
        self._end({"kind": "end", "code": HANG, "reason": reason})

    def _end(self, message: Message) -> None:
        """Ask the rank to end, and kill it if it does not."""
        self._tell_rank(message)
        if self._deadline_s is None:
            self._end_code = int(message["code"])
            self._deadline_s = time.monotonic() + END_S
            if self._rank_link is None and self._closed_s is not None:
                self._deadline_s = time.monotonic()

    def _report(self, now_s: float) -> None:
        """Report the status of the rank to the coordinator, a few times per second."""
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + REPORT_EVERY_S
        if self._exit_status is None:
            if self._lock and self._pid == 0:
                with suppress(OSError):  # the next process of the rank finds out
                    os.utime(self._lock)
            sent = {} if self._lease_s is None else {"sent_s": now_s}
            self._tell_coordinator({"kind": "status", "status": self._page.read(), **sent})

    def _look_at_lease(self, now_s: float) -> None:
        """Kill the rank if the coordinator may soon count this agent as lost. The agent can still get a replacement.

        A rank that was asked to end is killed too: after a pause of this node, its number may be another's by now.
        """
        if now_s >= self._lease_ends_s:
            self._cause = CUT_OFF
            self._signal(signal.SIGKILL)

    @property
    def _lease_ends_s(self) -> float:
        """Time at which the rank is killed unless the coordinator confirms a newer status, or infinity."""
        if self._lease_s is None or self._pid == 0 or self._is_leaving or self._exit_status is not None or self._cause:
            return math.inf
        return self._lease_s + self._options.silent_s

    def _look_at_spare(self, now_s: float) -> None:
        """Notice a spare that is dead or silent, and a replacement that was forked and has not connected."""
        if self._deadline_s is None:  # else the job ends, and needs no spare
            for seat in self._spare.look(now_s):
                self._tell_coordinator({"kind": "unfilled", "seat": seat})
        if self._begin_by_s is not None and now_s > self._begin_by_s:
            self._begin_by_s = None
            self._cause = f"the replacement did not begin within {BEGIN_S:g} s"
            self._closed_s = now_s
            self._signal(signal.SIGKILL)

    def _look_at_stop(self, now_s: float) -> None:
        """Pass a request to stop on to the coordinator, which obeys it while the job waits for a rank.

        At other times the ranks obey it. The signal handler itself must not send: it may have interrupted a message.
        Agent 0 looks for the file STOP while it has no process, because then there may be no rank to do that.
        """
        if self._stop is not None:
            self._ask_to_stop(signal.Signals(self._stop[0]).name)
        elif self._server is not None and now_s > self._next_look_s and (self._pid == 0 or self._stop_file):
            self._next_look_s = now_s + LOOK_EVERY_S
            path = Path(self._options.run_dir) / STOP
            self._stop_file = path if path.exists() else None
            self._ask_to_stop(f"the file {path}" if self._stop_file else "")

    def _ask_to_stop(self, reason: str) -> None:
        """Send a request to stop to the coordinator, once. An empty text withdraws the request before."""
        if reason != self._told_stop and self._coordinator is not None:
            self._tell_coordinator({"kind": "stop", "reason": reason, "withdrawn": self._told_stop})
            self._told_stop = reason

    def _look_at_rank(self, now_s: float) -> int | None:
        """Notice the end of the rank's process. Returns the exit code of this agent if the rank is not replaced."""
        if self._pid == 0 and self._deadline_s is not None:
            return self._end_code  # no replacement has come, and none will
        if self._child is not None and self._child.pid == self._pid and self._exit_status is None:
            self._exit_status = self._child.poll()
        if self._exit_status is None:
            if self._deadline_s is not None and now_s > self._deadline_s + KILLED_S:
                where = f"pid {self._pid} on {socket.gethostname()}"
                say(f"SIGKILL does not end {where}. The agent ends without its rank")
                return self._end_code
            if self._closed_s is None or now_s <= self._closed_s + CAUSE_S or self._rank_lives():
                return None
            # Its parent is gone too. The spare of a node ends with the node's first agent, at the end of a run too.
            self._exit_status = -signal.SIGKILL
        self._hear_rest()
        code = self._exit_status
        if self._deadline_s is not None and not self._is_leaving:
            return self._end_code
        is_early = code == 0 and self._has_joined and (self._announced_code > 0 or not self._is_leaving)
        if self._is_leaving and code <= 0:  # it may be killed while it leaves, by a launcher that ends the other ranks
            code = self._announced_code
        if code >= 0 or self._coordinator is None or -code in SIGNALS:
            exit_code = 128 - code if code < 0 else code
            if is_early:
                exit_code = 1  # of the agents of all ranks
                self._say_end(0)
            elif not self._is_leaving and not self._announced_code:
                self._say_end(code)
            self._tell_coordinator({"kind": "left", "code": exit_code})
            return exit_code
        cause = self._cause or signal.Signals(-code).name
        died = {"kind": "died", "cause": cause, "status": self._page.read()}
        self._forget_process()
        self._page.clear()
        self._tell_coordinator(died)
        return None

    def _rank_lives(self) -> bool:
        """Return whether the rank's process exists and has not ended. Another process may have got its pid since."""
        return self._pid > 0 and self._process is not None and self._process.lives() is True

    def _say_end(self, code: int) -> None:
        """Print that the rank has ended without having announced why, and is not replaced."""
        rank = self._number if self._plan is None else self._plan["rank"]
        who = f"rank {rank} on {socket.gethostname()} (pid {self._pid})"
        if code >= 0 and self._has_joined:
            when = "" if code else " before the end of the run"
            say(f"{who} has ended itself with exit code {code}{when}, and is not replaced")
        elif code < 0 and -code not in SIGNALS:
            name = signal.Signals(-code).name
            say(f"{who} died of {name} before all ranks had connected to each other, and is not replaced")


def _listen_at(address: str) -> socket.socket:
    """Return a Unix socket that listens in the abstract namespace, which leaves no file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address}")
    listener.listen()
    return listener


def connect_to(address: str) -> Connection:
    """Connect to the agent at this address. Raises OSError if it is gone."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(f"\0{address}")
    return Connection(peer)


def _is_readable(peer: socket.socket, seconds: float) -> bool:
    """Wait up to so many seconds until a socket can be read. Returns whether it can."""
    poll = select.poll()  # `select.select` refuses descriptors above 1,023
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _die_with_parent() -> Callable[[], Any]:
    """Return a function to call in a child process. It makes the kernel kill the child when this process ends."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: the child may only do little
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_agent(words: Sequence[str], options: AgentOptions) -> int:
    """Run an agent whose rank is `txl words`, until the rank has ended. Returns the exit code."""
    command = [sys.executable, "-m", "txl_dist", *words]
    # torch prints a stack of C++ frames for each connection that a lost rank breaks.
    variables = {"TORCH_CPP_LOG_LEVEL": "FATAL"} | _config_copy(words)

    def start(seat: Seat) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=variables | os.environ | {SEAT: seat.to_json()}, preexec_fn=_die_with_parent()
        )

    return Agent(start, options).run()


def _config_copy(words: Sequence[str]) -> dict[str, str]:
    """Return the variable `CONFIG_COPY` for a copy of the configuration file, if `txl words` has one: its second
    word."""
    if len(words) < 2 or words[1].startswith("-"):
        return {}
    copy = os.memfd_create("txl_config", os.MFD_CLOEXEC)
    with suppress(OSError), os.fdopen(copy, "wb", closefd=False) as file:  # without it the rank says what is wrong
        file.write(Path(words[1]).read_bytes())
        return {CONFIG_COPY: f"/proc/{os.getpid()}/fd/{copy}"}
    return {}
