"""The watchdog: finds the rank that hangs or was lost, names it in one line, and ends the run. It has one thread per
rank.

The main thread calls `beat` at every step and phase. The thread of the watchdog sends this heartbeat to the thread of
rank 0 (`heartbeats`). There are three kinds of failure:

    hang     no heartbeat of the main thread within the limit. At fault is a rank that is silent, else the rank at the
             lowest step, else the rank outside the collective in which the other ranks wait
    lost     a connection closes without an announcement. The other ranks end at once, before a collective times out
    failed   a rank calls `report` and prints its own error. The other ranks end without a message

Rank 0 decides and prints. If rank 0 does not answer, rank 1 and the first process of every other node decide and print
instead. All ranks write the stacks of all their threads, and abort a frozen rank of their node, which writes its own
stacks if it can. All ranks end by os._exit(HANG), because a stuck main thread cannot end.

There is also a safety net in C. If no Python thread can run for longer than the limit, because the interpreter lock is
held, the process writes its stacks and exits with code 1.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed import DistError

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import RankInfo, broadcast_object, is_waiting
from txl_dist.distributed.connection import Message
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.distributed.recovery.verdicts import ranks_waited_for
from txl_dist.errors import HANG, TxlError
from txl_dist.io.files import open_to_append
from txl_dist.train.monitoring.heartbeats import EXCHANGE_EVERY_S, Beat, Hub, Seen, Spoke

SILENT_AFTER_S = 3.0
"""Seconds without a report after which a rank counts as frozen, if another rank is stuck."""
LOST_AFTER_S = 2.0
"""Seconds after a broken connection within which a rank of another node must connect again. After this time the rank
counts as lost."""
DEAD_AFTER_S = 0.3
"""Seconds to wait after a process was found dead. In this time the other ranks reach the place where they wait for
it."""
NET_S = 4.0
"""Seconds between the limit and the moment at which the safety net in C ends the process."""
GRACE_S = {"hang": 0.0, "lost": 2.0, "failed": 10.0}
"""Seconds that the main thread has after a verdict, by the kind of the verdict. In this time it can ask for the first
cause and end by itself."""
WRITES_S = 2.0
"""Seconds that a frozen rank has to write its stacks."""
ANSWER_S = 4.0
"""Seconds to wait for a verdict after an error of this rank. If no verdict arrives, the error counts as this rank's
own."""
COLLECTIVES = ("torch.distributed.", "deepspeed.comm.")
"""Modules whose functions are collectives or wait for collectives. Other code that waits for ranks marks its wait with
`waiting`."""
_HANDLES = "deepspeed.runtime.zero."
"""Begin of the names of DeepSpeed's modules whose methods `wait` wait for a collective that is in progress."""
_NETWORK = re.compile(r"gloo|nccl|connection|socket|broken pipe|timed out|process group", re.IGNORECASE)
"""Words in messages of errors that the loss of another rank may have caused."""
STDERR = 2
"""Descriptor of standard error."""


class Verdict(NamedTuple):
    """Decision of the watchdog: which ranks are at fault, and how they failed. In JSON it is a list."""

    kind: str
    """Kind of the failure: hang (a rank makes no progress), lost (the connection to a rank broke) or failed (a rank
    reported an error)."""
    ranks: list[int]
    """Numbers of the ranks at fault."""
    line: str
    """Message for people. It is empty if the rank at fault has printed the message itself."""
    frozen: list[ProcessId]
    """Processes that cannot end by themselves. A rank of the same node kills them."""


class Watchdog:
    """Monitor of this rank's main thread. The watchdogs of all ranks together monitor the whole job.

    All ranks make their watchdog together. `limit_s` is the number of seconds without a beat after which a rank counts
    as hung. `stacks` is the folder for files of stack traces.
    """

    def __init__(self, ranks: RankInfo, *, limit_s: float, stacks: Path | None = None) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._main = threading.get_ident()
        self._last = (time.monotonic(), 0, "start")
        self._process = process_id()
        self._stacks: Path | None = None
        self._stacks_fd = STDERR
        self._notices: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._verdict: Verdict | None = None
        self._line = ""
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._closing = threading.Event()
        if ranks.is_rank0:
            hub = Hub()
        else:
            hub = None
        key, port = broadcast_object((hub.key, hub.port) if hub else ("", 0))
        self._link: Hub | Spoke = hub or Spoke(rank=ranks.rank, key=key, port=port)
        self.write_stacks_to(stacks)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, phase: str, *, step: int | None = None) -> None:
        """Record that the main thread has begun a phase of the step. This takes almost no time.

        Without `step` the step number stays the same.
        """
        _, last_step, _ = self._last
        self._last = (time.monotonic(), last_step if step is None else step, phase)

    def limit(self, limit_s: float) -> None:
        """Set the number of seconds without a beat after which a rank counts as hung.

        The limit is long during the start, and shorter after the first step.
        """
        self._limit_s = limit_s
        self._arm()

    def write_stacks_to(self, folder: Path | None) -> None:
        """Write stack traces to a file in this folder, which is created, and not to standard error. With None, or after
        an earlier call with a folder, the place of the stack traces does not change."""
        if folder is not None and self._stacks is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stacks = folder / f"rank_{self._ranks.rank:05d}.txt"
            # Opened now, since the net in C can open nothing. Appended to, so that the next start erases no stacks.
            self._stacks_fd = open_to_append(self._stacks)
        self._arm()
        faulthandler.enable(file=self._stacks_fd, all_threads=True)

    def first_cause(self, error: BaseException) -> str | None:
        """Find out whether another rank has caused an error of this rank. This can take a few seconds.

        Returns None if no other rank has caused the error. Otherwise returns the first cause in one line. The line is
        empty if another rank prints it.
        """
        may_be_caused = isinstance(error, RuntimeError) and not isinstance(error, TxlError)
        if not may_be_caused or self._ranks.world_size == 1:
            return None
        self._asked.set()
        self._answered.wait(ANSWER_S)
        if self._verdict is None:
            self._asked.clear()
            return None
        return self._line

    def report(self, error: BaseException) -> None:
        """Announce that this rank ends because of its own error, which it prints.

        The other ranks then end without a message.
        """
        self._notices.put({"failed": self._ranks.rank})
        self._leave()

    def close(self) -> None:
        """Announce that this rank ends together with all ranks, and end the thread."""
        self._notices.put({"left": True})
        self._leave()
        if self._stacks is not None:
            with suppress(OSError):  # files of other ranks may be in the folder
                if self._stacks.stat().st_size == 0:
                    self._stacks.unlink()
                self._stacks.parent.rmdir()

    def _leave(self) -> None:
        """End the thread of the watchdog, and switch off the safety net."""
        self._closing.set()
        self._asked.set()  # the thread need not wait for the main thread, which is here
        self._thread.join(ANSWER_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(file=STDERR)

    def _run(self) -> None:
        """Exchange heartbeats and judge them, in the thread, until this rank ends or a verdict is reached."""
        while not self._closing.is_set():
            self._arm()
            for notice in self._link.exchange(self._local_beat()):
                if "left" in notice:
                    self._link.seen[0].has_left = True
                elif "verdict" in notice:
                    return self._carry_out(_verdict(notice["verdict"]))
                elif "failed" in notice:
                    return self._pass_on(Verdict("failed", [notice["failed"]], "", []))
            verdict = self._judge(time.monotonic())
            if verdict is not None:
                return self._pass_on(verdict)
        while not self._notices.empty():
            notice = self._notices.get()
            if "failed" in notice and isinstance(self._link, Hub):
                notice = {"verdict": Verdict("failed", [0], "", [])}
            self._link.tell(notice)

    def _local_beat(self) -> Beat:
        """Return the heartbeat of this rank: its step and phase, and whether its main thread makes progress."""
        when_s, step, phase = self._last
        frame = sys._current_frames().get(self._main)
        idle_s = time.monotonic() - when_s
        asks = self._asked.is_set()
        return Beat(
            self._process,
            step,
            phase,
            where=_line(frame),
            is_waiting=is_waiting(self._main) or is_in_collective(frame),
            is_stalled=idle_s > self._limit_s and not asks,  # a rank that asks for the first cause is about to leave
            asks=asks,
            is_idle=idle_s > self._limit_s / 2,
        )

    def _judge(self, now_s: float) -> Verdict | None:
        """Return the verdict of the first row of the table below that applies, or None.

        Rank 0 has reports of all ranks. Any other rank has only the reports of rank 0 and of itself.

            a rank is lost                                          lost: these ranks
            no rank is stalled, and none asks for the first cause   no verdict: all is well
            a rank is silent                                        hang: the silent ranks
            a rank's beat is late                                   no verdict yet: it may be about to count as silent
            a rank is stalled, and rank 0 cannot judge instead      hang: the ranks that the others wait for
            otherwise                                               no verdict: no other rank has caused the error
        """
        seen = {rank: rank_seen for rank, rank_seen in self._link.seen.items() if not rank_seen.has_left}
        lost = [rank for rank, rank_seen in seen.items() if _is_lost(rank_seen, now_s)]
        if lost:
            return self._lost_verdict(lost, seen)
        is_stalled = any(rank_seen.beat.is_stalled for rank_seen in seen.values())
        if not is_stalled and not any(rank_seen.beat.asks for rank_seen in seen.values()):
            return None
        silence_s = {rank: now_s - rank_seen.heard_s for rank, rank_seen in seen.items()}
        silent = [rank for rank in seen if silence_s[rank] > SILENT_AFTER_S]
        if silent:
            return self._silent_verdict(silent, seen, silence_s=silence_s[silent[0]])
        if max(silence_s.values()) > 1.5 * EXCHANGE_EVERY_S:
            return None
        rank0_judges = isinstance(self._link, Spoke) and 0 in seen
        if is_stalled and not rank0_judges:
            return self._stalled_verdict(seen)
        return None

    def _lost_verdict(self, lost: list[int], seen: dict[int, Seen]) -> Verdict:
        """Return the verdict for the ranks in `lost`, whose connection broke."""
        line = f"{self._name(lost)} was lost at {self._position(seen[lost[0]].beat)}: killed, crashed or cut off."
        return Verdict("lost", lost, f"{line} The same command continues from the last checkpoint.", [])

    def _silent_verdict(self, silent: list[int], seen: dict[int, Seen], *, silence_s: float) -> Verdict:
        """Return the verdict for the ranks in `silent`, which do not answer. `silence_s` is the number of seconds since
        the last answer of the first rank in `silent`."""
        where = f"{self._position(seen[silent[0]].beat)}. The process or its host is frozen, or the network link is cut"
        line = self._hang_line(silent, f"not answered for {silence_s:.0f} s: {where}")
        return Verdict("hang", silent, line, [seen[rank].beat.process for rank in silent])

    def _stalled_verdict(self, seen: dict[int, Seen]) -> Verdict:
        """Return the verdict for ranks that send reports but make no progress, while other ranks wait for them."""
        idle_beats = {rank: rank_seen.beat for rank, rank_seen in seen.items() if rank_seen.beat.is_idle}
        culprits = ranks_waited_for(idle_beats)
        first = seen[culprits[0]].beat
        how = f"made no progress for {self._limit_s:g} s: {self._position(first)}, at {first.where}"
        return Verdict("hang", culprits, self._hang_line(culprits, how), [])

    def _hang_line(self, culprits: list[int], how: str) -> str:
        """Return the message of a hang: which ranks hang and how, where the stack traces are, and the remedy."""
        if self._stacks:
            stacks = f" Stacks of all ranks: {self._stacks.parent}."
        else:
            stacks = ""
        if len(culprits) > 1:
            have = "have"
        else:
            have = "has"
        return (
            f"{self._name(culprits)} {have} {how}.{stacks} The same command continues from the last checkpoint. If a "
            "step may take longer, raise --engine.timeout_s (before the first step --engine.start_timeout_s)."
        )

    def _name(self, ranks: list[int]) -> str:
        """Return the first three ranks with host and process, and the number of the other ranks, as text."""
        names = []
        for rank in ranks[:3]:
            process = self._link.seen[rank].beat.process
            names.append(f"rank {rank} on {process.host} (pid {process.pid})")
        if len(ranks) > 3:
            names.append(counted(len(ranks) - 3, "other"))
        return " and ".join(names)

    def _position(self, beat: Beat) -> str:
        """Return the step and phase that the run had reached, as text.

        The last beat of a silent rank may be a second old, but other ranks cannot finish a step without that rank.
        """
        _, step, phase = self._last
        if step <= beat.step:
            step = beat.step
            phase = beat.phase
        return f"step {step}, in phase `{phase}`"

    def _pass_on(self, verdict: Verdict) -> None:
        """Send this rank's verdict to the other ranks, or print it, and then carry it out.

        If rank 0 does not answer, ranks cannot learn which other ranks still run. So one rank per node prints the
        verdict.
        """
        if isinstance(self._link, Hub):
            self._link.tell({"verdict": verdict})
            self._line = verdict.line
        elif self._ranks.rank in (1, *verdict.ranks) or self._ranks.local_rank == 0:
            self._line = verdict.line
        self._carry_out(verdict)

    def _carry_out(self, verdict: Verdict) -> None:
        """End this process because of a verdict, unless the main thread asks for the first cause and ends by itself."""
        self._verdict = verdict
        if verdict.kind == "hang":
            self._dump()
            first_of_node = self._ranks.rank - self._ranks.local_rank
            up_to_this = range(first_of_node, self._ranks.rank + 1)
            first_alive = min(set(up_to_this) - set(verdict.ranks), default=None)
            end_frozen(verdict.frozen, asks=self._ranks.rank == first_alive)
        if self._asked.wait(GRACE_S[verdict.kind]):
            self._answered.set()
            return
        faulthandler.dump_traceback_later(NET_S, exit=True, file=self._stacks_fd)  # in case even this gets stuck
        if self._line:
            logger.error(self._line)
            logging.shutdown()
        os._exit(HANG)

    def _arm(self) -> None:
        """Start the countdown of the safety net again. The safety net ends the process if no Python thread can run."""
        faulthandler.dump_traceback_later(self._limit_s + NET_S, exit=True, file=self._stacks_fd)

    def _dump(self) -> None:
        """Append the stacks of all threads of this process to its file of stack traces."""
        with suppress(OSError):
            title = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._ranks.rank}\n"
            os.write(self._stacks_fd, title.encode())
            faulthandler.dump_traceback(file=self._stacks_fd, all_threads=True)


def _is_lost(seen: Seen, now_s: float) -> bool:
    """Return whether a rank's connection broke more than `LOST_AFTER_S` ago, or `DEAD_AFTER_S` if its process is
    dead."""
    if seen.closed_s is None:
        return False
    is_dead = seen.beat.process.lives() is False
    if is_dead:
        limit_s = DEAD_AFTER_S
    else:
        limit_s = LOST_AFTER_S
    return now_s - seen.closed_s > limit_s


def _line(frame: FrameType | None) -> str:
    """Return the line of code that a thread runs, as text."""
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread runs a collective or waits for a collective.

    A collective that DeepSpeed calls within a pass counts too, and its waits for handles of earlier ones (ZeRO-3).
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_wait_for_handle = frame.f_code.co_name == "wait" and module.startswith(_HANDLES)
        if is_wait_for_handle or module.startswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def may_come_from_loss(error: BaseException) -> bool:
    """Return whether the loss of another rank may have caused an error of this rank.

    Such an error was raised inside a collective, or its message is about the network. Any other error is the rank's
    own: for instance, the setting of a wrong value, or too little memory.
    """
    if isinstance(error, OSError | DistError) or _NETWORK.search(str(error)):
        return True
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith(COLLECTIVES):
            return True
        trace = trace.tb_next
    return False


def end_frozen(processes: list[ProcessId], *, asks: bool) -> None:
    """End frozen processes of this node.

    One rank of the node calls this function with `asks` set, and sends SIGABRT to the processes. At this signal a
    process writes its stacks by a handler in C, if it still can. Other ranks do not send SIGABRT, because a second
    signal would end the process before its stacks are written. After `WRITES_S` seconds each rank sends SIGKILL.
    """
    if asks:
        _send(signal.SIGABRT, processes)
    until_s = time.monotonic() + WRITES_S
    while time.monotonic() < until_s and any(process.lives() for process in processes):
        time.sleep(0.05)
    _send(signal.SIGKILL, processes)


def _send(number: int, processes: list[ProcessId]) -> None:
    """Send a signal to those processes that are alive."""
    for process in processes:
        if process.lives():
            with suppress(OSError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # the stacks say enough
                os.kill(process.pid, number)


def _verdict(values: list[Any]) -> Verdict:
    """Return the verdict that `values`, a list from JSON, describes."""
    kind, ranks, line, frozen = values
    return Verdict(kind, ranks, line, [process_of(process) for process in frozen])
