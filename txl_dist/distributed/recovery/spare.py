"""The start of an agent, and the spare process that forks replacements of lost ranks.

    supervise            replaces the process that a launcher started by an agent. The pid stays the same
    serve_replacements   the loop of a spare, which has imported everything. It returns in each replacement

A spare holds modules only: no thread, no process group, no device. So a fork of it is a fresh process that need not
import anything, and one spare serves any number of losses.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from txl_dist.config.registry import plugins_text
from txl_dist.distributed.connection import Connection
from txl_dist.distributed.processes import is_stopped, name_process
from txl_dist.distributed.recovery.agent import SIGNALS, connect_to
from txl_dist.distributed.recovery.seat import SEAT, AgentOptions, Seat, read_seat, seat_of, take_seat
from txl_dist.errors import ConfigError
from txl_dist.fault_injection import failpoint
from txl_dist.version import code_version

_POLL_S = 0.05
_LAST_LOOK_S = 1.0
"""Longest time in seconds that a spare looks for stopped replacements after its agent has ended."""


def supervise(words: Sequence[str], options: AgentOptions) -> None:
    """Replace this process by an agent that runs `txl words`. Returns in a process that an agent has started."""
    if SEAT in os.environ:
        return
    given = json.dumps({"words": list(words), "options": options._asdict()})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "txl_dist.distributed.recovery", given])


def is_spare(environment: Mapping[str, str]) -> bool:
    """Return whether an agent has started this process as a spare."""
    seat = read_seat(environment)
    return seat is not None and seat.is_spare


def serve_replacements() -> None:
    """Wait as a spare, and fork a replacement whenever the agent asks. Returns only in the replacements.

    The caller has imported everything that a rank needs. The process ends when its agent has ended. Raises ConfigError
    if the code on disk is not that of the job any more.
    """
    seat = read_seat(os.environ)
    assert seat is not None
    name_process("txl-spare")
    _check_code(seat)
    failpoint("spare", step=0)
    for number in SIGNALS:  # they are meant for ranks
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a later collection does not look at the modules, so it takes 20 ms and not 300
    agent = connect_to(seat.address)
    agent.send({"kind": "spare", "pid": os.getpid()})
    selector = selectors.DefaultSelector()
    selector.register(agent.peer, selectors.EVENT_READ)
    parents: dict[int, Connection] = {}
    while True:
        is_readable = bool(selector.select(_POLL_S if parents else None))
        try:
            messages = agent.receive() if is_readable else []
        except (OSError, ValueError):
            _end_with_agent(parents)
            os._exit(0)
        for message in messages:
            if message["kind"] == "fork" and _fork(seat_of(message["seat"]), parents):
                agent.peer.close()
                return
            with suppress(OSError):  # the agent has ended, which the next turn notices
                agent.send({"kind": "forked" if message["kind"] == "fork" else "pong"})
        _report_exits(parents)


def _check_code(seat: Seat) -> None:
    """Check that what this process has imported is the code of the job. Raises ConfigError."""
    code = code_version() + plugins_text()
    if code != seat.code + seat.plugins:
        raise ConfigError(
            "the code has changed since the job started, so no new process can replace its ranks: the job runs "
            f"{seat.code}{seat.plugins}, and {code} is installed now. Install the versions of the job, or stop and "
            "resume it."
        )


def _fork(seat: Seat, parents: dict[int, Connection]) -> bool:
    """Fork a replacement for the seat. Returns True in the replacement.

    In the replacement stop signals are blocked until `PreemptionRequests` can record them. `parents` maps the pid of
    each replacement to a connection to its agent, over which its exit status is sent.
    """
    try:
        link = connect_to(seat.address)
    except OSError:
        return False  # the job has ended meanwhile
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        parents[pid] = link
        with suppress(OSError):  # that agent has ended
            link.send({"kind": "forked", "pid": pid})
        return False
    for connection in (link, *parents.values()):
        connection.peer.close()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_seat(seat)
    return True


def _end_with_agent(parents: dict[int, Connection]) -> None:
    """Kill the replacements that are stopped, because they would not notice that their agents have ended.

    On a busy machine a signal that stops a process may take effect a moment later. So this looks for up to
    `_LAST_LOOK_S` seconds, and meanwhile reports the replacements that end by themselves.
    """
    end_s = time.monotonic() + _LAST_LOOK_S
    _report_exits(parents)
    while parents and time.monotonic() < end_s:
        for pid in parents:
            if is_stopped(pid):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        _report_exits(parents)


def _report_exits(parents: dict[int, Connection]) -> None:
    """Send the exit status of each replacement that has ended to the agent of its seat."""
    for pid, link in list(parents.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with suppress(OSError):  # that agent has ended
                link.send({"kind": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})
            link.peer.close()
            del parents[pid]
