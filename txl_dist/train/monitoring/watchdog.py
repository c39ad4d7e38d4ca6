"""Finds the rank that hangs or was lost, says so in one line, and ends the job. One daemon thread per rank.

The main thread calls `beat` at every step and phase; the thread tells rank 0's thread about it (heartbeats.py).
    hangs    no beat for the limit: who is silent, else behind, else outside the collective that others wait in, is it
    is lost  its connection closes without a goodbye: the others end at once, not at the time-out of a collective
    fails    it says so by `report`, prints its own error, and the others leave without a word
Rank 0 judges and prints; if it does not answer, rank 1 does, and the first process of every other node. All write the
stacks of all their threads, abort a frozen rank beside them (which writes its own, if it can), and leave by
os._exit(HANG), for a stuck main thread cannot. Below this is a net in C: a process whose interpreter lock is held past
the limit, so that no thread runs, writes its stacks and ends by itself, with exit code 1.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.distributed.collectives import RankInfo, broadcast_object, is_waiting
from txl_dist.distributed.processes import ProcessId, process_id, process_of
from txl_dist.errors import HANG, TxlError
from txl_dist.io.files import open_to_append
from txl_dist.train.monitoring.heartbeats import EXCHANGE_EVERY_S, Beat, Hub, Message, Seen, Spoke

SILENT_AFTER_S = 3.0
"""Seconds without a word after which a rank counts as frozen, once another one is stuck."""
LOST_AFTER_S = 2.0
"""Seconds that a rank of another node has to connect again."""
DEAD_AFTER_S = 0.3
"""The same for a rank whose process is seen to be dead: time for the others to get to where they wait for it."""
NET_S = 4.0
"""The net in C comes so much later than the limit."""
GRACE_S = {"hang": 0.0, "lost": 2.0, "failed": 10.0}
"""By the kind of verdict: what the main thread has, to come by itself for the first cause and leave in its own way."""
WRITES_S = 2.0
"""What a frozen rank has to write its stacks."""
ANSWER_S = 4.0
"""No verdict within so many seconds after an error: no other rank has caused it."""
COLLECTIVES = ("torch.distributed.", "deepspeed.comm.")
"""Whose functions are collectives, or wait for one. What else waits for other ranks says so (`dist.waiting`)."""
STDERR = 2


class Verdict(NamedTuple):
    """Who did it. JSON keeps it as a list."""

    kind: str
    """hang, lost or failed."""
    ranks: list[int]
    line: str
    """For people; empty if the rank itself has said it."""
    frozen: list[ProcessId]
    """To be killed by who runs beside them: they cannot end by themselves."""


class Watchdog:
    """Watches over this rank's main thread, and with the others over all. Every rank makes one, together.

    `limit_s`: seconds without a beat after which a rank hangs.
    """

    def __init__(self, ranks: RankInfo, *, limit_s: float, stacks: Path | None = None) -> None:
        self._ranks, self._limit_s = ranks, limit_s
        self._main = threading.get_ident()
        self._last = (time.monotonic(), 0, "start")
        self._process = process_id()
        self._stacks: Path | None = None
        self._stacks_fd = STDERR
        self._notices: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._verdict: Verdict | None = None
        self._line = ""
        self._asked, self._answered, self._closing = threading.Event(), threading.Event(), threading.Event()
        hub = Hub() if ranks.is_rank0 else None
        key, port = broadcast_object((hub.key, hub.port) if hub else ("", 0))
        self._link: Hub | Spoke = hub or Spoke(rank=ranks.rank, key=key, port=port)
        self.write_stacks_to(stacks)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, phase: str, *, step: int | None = None) -> None:
        """The main thread has begun this phase, of the same step as before if none is named. Costs nothing."""
        self._last = (time.monotonic(), self._last[1] if step is None else step, phase)

    def limit(self, limit_s: float) -> None:
        """Another limit from now on: long for the start, shorter once a step has been made."""
        self._limit_s = limit_s
        self._arm()

    def write_stacks_to(self, folder: Path | None) -> None:
        """Write stacks to files in this folder, which is made, instead of standard error."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stacks = folder / f"rank_{self._ranks.rank:05d}.txt"
            # Opened now: the net in C can open nothing. Appended to: the next start must not erase what was found.
            self._stacks_fd = open_to_append(self._stacks)
        self._arm()
        faulthandler.enable(file=self._stacks_fd, all_threads=True)

    def first_cause(self, error: BaseException) -> str | None:
        """After an error: None if it is this rank's own, else what came first, in one line; empty if others say it.

        Waits a few seconds where another rank may be behind it.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, TxlError) or self._ranks.world_size == 1:
            return None
        self._asked.set()
        self._answered.wait(ANSWER_S)
        if self._verdict is None:
            self._asked.clear()
            return None
        return self._line

    def report(self, error: BaseException) -> None:
        """Before this rank leaves because of an error of its own, which it prints: the others leave silently then."""
        self._notices.put({"failed": self._ranks.rank})
        self._leave()

    def close(self) -> None:
        """Before this rank leaves because all do."""
        self._notices.put({"left": True})
        self._leave()
        if self._stacks is not None:
            with suppress(OSError):  # others' may be in the folder
                if self._stacks.stat().st_size == 0:
                    self._stacks.unlink()
                self._stacks.parent.rmdir()

    def _leave(self) -> None:
        self._closing.set()
        self._asked.set()  # the thread need not wait for the main thread, which is here
        self._thread.join(ANSWER_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(file=STDERR)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._arm()
            for notice in self._link.exchange(self._own_beat()):
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

    def _own_beat(self) -> Beat:
        when_s, step, phase = self._last
        frame = sys._current_frames().get(self._main)
        where, waits = _line(frame), is_waiting(self._main) or _is_in_collective(frame)
        idle_s = time.monotonic() - when_s
        # Who asks for the first cause is about to leave.
        is_stalled = idle_s > self._limit_s and not self._asked.is_set()
        return Beat(
            self._process, step, phase, where, waits, is_stalled, self._asked.is_set(), idle_s > self._limit_s / 2
        )

    def _judge(self, now_s: float) -> Verdict | None:
        """What can be said with what this rank knows: the hub knows all ranks, others only rank 0 and themselves."""
        seen = {rank: one for rank, one in self._link.seen.items() if not one.has_left}
        lost = [rank for rank, one in seen.items() if _is_lost(one, now_s)]
        if lost:
            line = f"{self._name(lost)} was lost at {self._position(seen[lost[0]].beat)}: killed, crashed or cut off."
            return Verdict("lost", lost, f"{line} The same command goes on from the last checkpoint.", [])
        is_stalled = any(one.beat.is_stalled for one in seen.values())
        if not is_stalled and not any(one.beat.asks for one in seen.values()):
            return None
        silent_s = {rank: now_s - one.heard_s for rank, one in seen.items()}
        silent = [rank for rank in seen if silent_s[rank] > SILENT_AFTER_S]
        if not silent and max(silent_s.values()) > 1.5 * EXCHANGE_EVERY_S:
            return None  # one is about to count as frozen
        if not silent and (not is_stalled or (isinstance(self._link, Spoke) and 0 in seen)):
            return None
        culprits = silent or behind({rank: one.beat for rank, one in seen.items() if one.beat.is_idle})
        first, have = seen[culprits[0]].beat, "have" if len(culprits) > 1 else "has"
        if silent:
            since_s = silent_s[culprits[0]]
            where = f"{self._position(first)}; a process or host stands still, or the link to it is cut"
            how = f"{have} not answered for {since_s:.0f} s: {where}"
        else:
            how = f"{have} made no progress for {self._limit_s:g} s: {self._position(first)}, at {first.where}"
        stacks = f" Stacks of all ranks: {self._stacks.parent}." if self._stacks else ""
        line = (
            f"{self._name(culprits)} {how}.{stacks} The same command goes on from the last checkpoint; if a step may "
            "take longer, raise --engine.timeout_s (before the first step --engine.start_timeout_s)."
        )
        return Verdict("hang", culprits, line, [seen[rank].beat.process for rank in silent])

    def _name(self, ranks: list[int]) -> str:
        names = [
            f"rank {rank} on {process.host} (pid {process.pid})"
            for rank, process in ((rank, self._link.seen[rank].beat.process) for rank in ranks[:3])
        ]
        return " and ".join(names) + (f" and {counted(len(ranks) - 3, 'other')}" if len(ranks) > 3 else "")

    def _position(self, beat: Beat) -> str:
        """Where the job stood: what a silent rank said last may be a second old, but nobody gets far without it."""
        _, step, phase = self._last
        if step <= beat.step:
            step, phase = beat.step, beat.phase
        return f"step {step}, in phase `{phase}`"

    def _pass_on(self, verdict: Verdict) -> None:
        """This rank has judged, so it speaks. Without rank 0 nobody knows who else is there: one per node does then."""
        if isinstance(self._link, Hub):
            self._link.tell({"verdict": verdict})
            self._line = verdict.line
        elif self._ranks.rank in (1, *verdict.ranks) or self._ranks.local_rank == 0:
            self._line = verdict.line
        self._carry_out(verdict)

    def _carry_out(self, verdict: Verdict) -> None:
        """Leave it to the main thread if that asks for the first cause; else end this process."""
        self._verdict = verdict
        if verdict.kind == "hang":
            self._dump()
            ranks = self._ranks
            beside = range(ranks.rank - ranks.local_rank, ranks.rank + 1)
            end_frozen(verdict.frozen, asks=ranks.rank == min(set(beside) - set(verdict.ranks), default=None))
        if self._asked.wait(GRACE_S[verdict.kind]):
            self._answered.set()
            return
        faulthandler.dump_traceback_later(NET_S, exit=True, file=self._stacks_fd)  # should even this get stuck
        if self._line:
            logger.error(self._line)
            logging.shutdown()
        os._exit(HANG)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s + NET_S, exit=True, file=self._stacks_fd)

    def _dump(self) -> None:
        with suppress(OSError):
            title = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._ranks.rank}\n"
            os.write(self._stacks_fd, title.encode())
            faulthandler.dump_traceback(file=self._stacks_fd, all_threads=True)


def behind(beats: dict[int, Beat]) -> list[int]:
    """The ranks that the others wait for: the lowest step, and of these who is not inside a collective, if any is."""
    lowest = min(beat.step for beat in beats.values())
    late = {rank: beat for rank, beat in beats.items() if beat.step == lowest}
    return sorted(rank for rank, beat in late.items() if not beat.is_waiting) or sorted(late)


def _is_lost(seen: Seen, now_s: float) -> bool:
    if seen.closed_s is None:
        return False
    is_dead = seen.beat.process.lives() is False
    return now_s - seen.closed_s > (DEAD_AFTER_S if is_dead else LOST_AFTER_S)


def _line(frame: FrameType | None) -> str:
    """That a thread runs."""
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is in one, or in what waits for one, also where DeepSpeed calls it within a pass."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def end_frozen(processes: list[ProcessId], *, asks: bool) -> None:
    """End those that run beside this one. One rank of a node asks, and who still can writes its stacks, in C: a second
    SIGABRT would end it while it writes."""
    if asks:
        _send(signal.SIGABRT, processes)
    until_s = time.monotonic() + WRITES_S
    while time.monotonic() < until_s and any(process.lives() for process in processes):
        time.sleep(0.05)
    _send(signal.SIGKILL, processes)


def _send(number: int, processes: list[ProcessId]) -> None:
    for process in processes:
        if process.lives():
            with suppress(OSError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # the stacks say enough
                os.kill(process.pid, number)


def _verdict(values: list[Any]) -> Verdict:
    kind, ranks, line, frozen = values
    return Verdict(kind, ranks, line, [process_of(process) for process in frozen])
