"""Requests to stop this process. This module only records the requests. The loop reads `reason` once a step, and sends
the result to all ranks.

A request is one of the following: the signals SIGTERM, SIGINT and SIGUSR1, the file RUN/STOP, a time limit, the loss of
the run directory, or the end of the launcher. The end of the launcher counts because `deepspeed` ends at once on a
SIGTERM and leaves its ranks running. DeepSpeed's node launcher also leaves its ranks running when it is killed. So
every rank watches the launchers among its ancestors. A shell does not count as a launcher.

A thread logs the first two signals as soon as they arrive. Python calls a signal handler only between two operations of
the main thread, and one operation of a large step can take minutes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import FrameType

from txl_dist.console.logging import logger
from txl_dist.distributed.processes import ProcessId, command_of, parent_of, process_age_s, process_id, process_of
from txl_dist.errors import ConfigError
from txl_dist.io.files import parse_json, was_removed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask this process to stop."""
POLL_EVERY_S = 1.0
"""Seconds between two checks of the file, the clock and the launchers. Signals are checked at every step."""
LAUNCHED_BY = "TXL_LAUNCHED_BY"
"""Environment variable in which `txl launch` stores the host, pid and start time of its own process. So a rank notices
the end of `txl launch` even if `txl launch` ended before the rank started."""
LOST_REQUEST = "a request to a rank that was lost"
"""Reason to stop if all ranks have agreed to it, but no rank has the request any more."""
MADE_BY_LAUNCHERS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")
"""Variables of the environment that the launchers of DeepSpeed and torch set for each rank."""


class PreemptionRequests:
    """Monitor of requests to stop this process. The main thread creates this object and reads `reason`.

    `stop_file` is a file in the run directory. `max_time_s` is the largest age of the job in seconds, and 0 means no
    limit. Only rank 0 uses these two arguments, or `watch` if it becomes rank 0 later. `first_pid` is the process with
    which the job started here: 0 for this process, or the agent, which is older than a replacement. A replacement has
    blocked stop signals since its fork. They arrive now.
    """

    def __init__(self, *, stop_file: Path | None = None, max_time_s: float = 0.0, first_pid: int = 0) -> None:
        self._stop_file = stop_file
        self._max_time_s = max_time_s
        self.is_agreed = False
        """Whether all ranks have agreed to stop, because of a request to any of them. That rank may be lost now."""
        self._reason = ""
        self._signals: list[int] = []
        self._others: list[str] = []  # reasons besides signals
        self._next_poll_s = 0.0
        self._start_s = time.monotonic() - process_age_s(first_pid)
        self._launchers = launchers(first_pid)
        parent = parent_of(first_pid or os.getpid())
        self._is_orphan = not self._launchers and parent == 1 and not os.environ.keys().isdisjoint(MADE_BY_LAUNCHERS)
        self._restore = ExitStack()
        for number in SIGNALS:
            self._restore.callback(signal.signal, number, signal.signal(number, self._record_signal))
        self._restore.callback(_Acknowledgement().close)
        if first_pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def watch(self, *, stop_file: Path, max_time_s: float) -> None:
        """Watch a file and the age of the job too, because this process is rank 0."""
        self._stop_file = stop_file
        self._max_time_s = max_time_s

    @property
    def reason(self) -> str:
        """The first reason to stop, for instance "SIGTERM". It is empty if there was no request."""
        self._update()
        return self._reason

    def reason_with(self, *, stop_file: Path, max_time_s: float) -> str:
        """Return the first reason to stop as rank 0 sees it, which may be this file or the age of the job.

        Neither is recorded, so rank 0 alone reports it later. The value is empty if there is no reason.
        """
        agreed = LOST_REQUEST if self.is_agreed else ""
        return self.reason or agreed or next(self._other_reasons(stop_file, max_time_s), "")

    @property
    def count(self) -> int:
        """Number of requests so far. Each signal counts, so that repeated signals can be noticed."""
        self._update()
        return len(self._signals) + len(self._others)

    def clear(self) -> None:
        """Remove the stop file after it has stopped the run. Otherwise the file would stop the run again at its next
        start."""
        if self._stop_file is not None and self._stop_file.is_dir() and not self._stop_file.is_symlink():
            self._stop_file.rmdir()  # somebody's mkdir
        elif self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        self._restore.close()

    def _update(self) -> None:
        """Read new signals, and once a second check the other reasons."""
        if self._signals and not self._reason:
            self._reason = signal.Signals(self._signals[0]).name
        if time.monotonic() < self._next_poll_s:
            return
        self._next_poll_s = time.monotonic() + POLL_EVERY_S
        for reason in self._other_reasons(self._stop_file, self._max_time_s):
            if reason not in self._others:
                self._others.append(reason)
                self._reason = self._reason or reason
                logger.info("asked to stop by %s", reason)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)  # no logging here: the main thread may be in the middle of a write

    def _other_reasons(self, stop_file: Path | None, max_time_s: float) -> Iterator[str]:
        """Yield each present reason to stop that is not a signal."""
        if stop_file is not None and os.path.exists(stop_file):
            yield f"the file {stop_file}"
        if stop_file is not None and was_removed(stop_file.parent):
            yield f"the loss of the run directory {stop_file.parent}"
        if max_time_s and time.monotonic() - self._start_s >= max_time_s:
            yield f"the time limit of {max_time_s:g} s"
        if self._is_orphan or any(launcher.lives() is False for launcher in self._launchers):
            yield "the end of the launcher"


class _Acknowledgement:
    """Thread that logs the first two stop signals when they arrive. The main thread makes and closes it."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        # Python's handler in C writes the number of each signal there, without waiting for the main thread.
        self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = Thread(target=self._log_signals, name="stop signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after it has logged the signals that have arrived."""
        signal.set_wakeup_fd(self._before)
        self._sender.shutdown(socket.SHUT_RDWR)  # closing is not enough if a child process holds a copy
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _log_signals(self) -> None:
        """Log the first two stop signals that arrive, in the thread.

        Further signals are not logged, because a launcher may repeat a signal that the terminal has already sent.
        """
        num_logged = 0
        while numbers := self._receiver.recv(64):
            for name in [signal.Signals(number).name for number in numbers if number in SIGNALS]:
                if num_logged == 0:
                    logger.info("asked to stop by %s: the run saves after the current step, then exits", name)
                elif num_logged == 1:
                    logger.info("%s again: the run is already stopping", name)
                num_logged += 1


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as "90", "90s", "15m", "2h30m", "1d" or "1:30:00" means.

    Raises ConfigError for any other text, and for 0 seconds.
    """
    match = re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?", text) or re.fullmatch(
        r"()(\d{1,9}):([0-5]\d):([0-5]\d)", text
    )
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    else:
        days, hours, minutes, seconds = (0, 0, 0, 0)
    duration_s = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not duration_s:
        raise ConfigError(
            f"{text!r} is not a duration above 0. Write a number of seconds (90), numbers with units (2h30m, 15m, 1d), "
            "or hours, minutes and seconds (1:30:00)."
        )
    return duration_s


def launchers(pid: int = 0) -> list[ProcessId]:
    """Return the launchers among the ancestors of a process, for instance `deepspeed`, `torchrun` or `txl launch`. A
    pid of 0 means this process."""
    launcher = os.environ.get(LAUNCHED_BY)
    if launcher:
        processes = [process_of(parse_json(launcher))]
    else:
        processes = []
    pid = parent_of(pid or os.getpid())
    while pid > 0:  # in a container a launcher may have the pid 1
        if _is_launcher(command_of(pid)):
            processes.append(process_id(pid))
        pid = parent_of(pid)
    return processes


def _is_launcher(command: list[str]) -> bool:
    """Return whether a command line starts a launcher of DeepSpeed or torch.

    Examples: python .../bin/deepspeed, python -u -m deepspeed.launcher.launch, python .../bin/torchrun.
    """
    names = {Path(word).name for word in command[:2]}
    modules = {
        command[index + 1] for index, word in enumerate(command[:4]) if word == "-m" and index + 1 < len(command)
    }
    return bool(
        names & {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
        or modules & {"deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
    )
