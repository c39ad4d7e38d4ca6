"""The coordinator of recovery: hears the agents of all ranks, and decides which ranks are replaced and when they meet.

    agent -> coordinator    hello, status, died, unfilled, ready, stepped, left
    coordinator -> agent    plan, replace, meet, kill, end

    all run --a rank is lost--> plan g + 1 to all --every rank is ready--> meet --all made a step--> all run

A generation is one membership of the job: the same rank numbers, held by certain processes. Each loss begins a new
generation, and a newer generation supersedes an unfinished one. Ranks only connect to each other after every rank has
said that it is ready, so no rank waits for a process that does not exist.

The job ends if a loss repeats itself, because the next attempt would fail too: a batch that kills its rank, or memory
that is too small. It also ends after too many losses in a row, and if an agent is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from txl_dist.distributed.connection import Message
from txl_dist.distributed.rank_environment import format_ranks
from txl_dist.distributed.recovery.status import Status
from txl_dist.errors import HANG

READY_S = 30.0
"""Seconds that a survivor has, after a plan, to leave its generation. Then its process is killed and replaced."""
REPLACED_S = 120.0
"""Seconds within which a replacement must be ready. A spare that has imported everything needs a fraction of one."""
PER_HOUR = 120
"""Largest number of recoveries within an hour."""
_HOUR_S = 3600.0


class Progress(Protocol):
    """Progress of a rank, as far as `ranks_waited_for` needs it."""

    @property
    def step(self) -> int:
        """Training step that the rank has reached."""

    @property
    def is_waiting(self) -> bool:
        """Whether the main thread is inside a collective."""


class Loss(NamedTuple):
    """Loss of one rank: which rank, and how and where its process ended. JSON stores it as a list."""

    rank: int
    host: str
    pid: int
    cause: str
    """Way in which the process ended, for example SIGKILL, or the reason why it was killed."""
    step: int
    """Step that the rank had reached."""
    phase: str
    """Part of the step that the rank had begun."""
    notice_s: float
    """Seconds between the rank's last heartbeat and the notice of the loss."""

    def repeats(self, other: Loss) -> bool:
        """Return whether two losses have the same rank, cause, step and phase."""
        return (self.rank, self.cause, self.step, self.phase) == (other.rank, other.cause, other.step, other.phase)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} (pid {self.pid}) was lost at step {self.step}, in phase `{self.phase}`: "
            f"{self.cause}"
        )


@dataclass
class _Rank:
    """State of one rank in the coordinator."""

    host: str = ""
    node: str = ""
    seat: list[object] = field(default_factory=list)
    pid: int = 0
    status: Status | None = None
    heard_s: float = 0.0
    """Time at which the status was received."""
    is_alive: bool = True
    """Whether the rank has a process."""
    ready: int = 1
    """Generation for which the rank is ready to meet."""
    stepped: int = 0
    """Generation in which the rank has finished a step."""
    has_left: bool = False
    kill: str = ""
    """Reason for which the coordinator has ordered the process to be killed, or an empty text."""


class Coordinator:
    """State machine of recovery. The caller delivers the messages in `outbox` after each call."""

    def __init__(self, world_size: int, *, silent_s: float, max_in_row: int) -> None:
        """Start with no agent.

        `silent_s` is the number of seconds without a heartbeat after which a rank counts as frozen. The job ends after
        more than `max_in_row` failed generations without a finished step between them.
        """
        self.outbox: list[tuple[int, Message]] = []
        """Messages to deliver: (rank whose agent gets the message, message)."""
        self.lines: list[str] = []
        """Lines for people that the caller prints."""
        self.generation = 1
        self.is_ended = False
        self._world_size = world_size
        self._silent_s = silent_s
        self._max_in_row = max_in_row
        self._ranks: dict[int, _Rank] = {}
        self._losses: list[Loss] = []  # since the last finished step
        self._num_failed = 0  # generations that lost a rank since the last finished step
        self._recent: deque[float] = deque()
        self._planned_s = 0.0
        self._began_s = 0.0  # time of the first loss since the last finished step
        self._has_met = True
        self._port = 0

    def receive(self, rank: int, message: Message, now_s: float) -> None:
        """Act on a message of the agent of `rank`. Raises KeyError, TypeError or ValueError for malformed messages."""
        kind = message["kind"]
        if kind == "hello":
            self._ranks[rank] = _Rank(message["host"], message["node"], message["seat"], message["pid"])
        elif kind == "status":
            self._ranks[rank].status = Status(*message["status"])
            self._ranks[rank].heard_s = now_s
        elif kind == "started":
            self._ranks[rank].pid = int(message["pid"])
        elif kind == "died":
            self._lose(rank, message, now_s)
        elif kind == "unfilled":
            self._stay_unfilled(list(message["seat"]))
        elif kind == "ready":
            self._become_ready(rank, message)
        elif kind == "stepped":
            self._finish_step(rank, int(message["generation"]))
        elif kind == "failed":
            self._fail(rank, code=int(message["code"]), reason=str(message["reason"]))
        elif kind == "left":
            self._leave(rank, int(message["code"]))
        else:
            raise ValueError(f"the message {kind!r} is unknown")

    def lose_agent(self, rank: int) -> None:
        """Act on the end of an agent. Its rank ends with it, so the job ends, unless the rank has left the job."""
        if not self._ranks[rank].has_left:
            self._end(f"the agent of rank {rank} on {self._ranks[rank].host} was lost, and its rank with it")

    def tick(self, now_s: float) -> None:
        """Find ranks that are frozen or hang, or that do not become ready. Call it a few times per second."""
        if self.is_ended or len(self._ranks) < self._world_size:
            return
        if not self._has_met:
            self._judge_regroup(now_s)
        for rank, why in self._find_stuck(now_s).items():
            self._kill(rank, why)

    def _lose(self, rank: int, message: Message, now_s: float) -> None:
        """Begin a new generation without the process of a rank that died, or end the job."""
        lost = self._ranks[rank]
        cause = lost.kill or str(message["cause"])
        status = Status(*message["status"])
        loss = Loss(rank, lost.host, lost.pid, cause, status.step, status.phase, round(status.silent_s, 3))
        lost.is_alive = False
        lost.kill = ""
        lost.status = None
        if self.is_ended:
            return
        if not self._losses:
            self._began_s = now_s
        repeated = any(loss.repeats(earlier) for earlier in self._losses)
        self._losses.append(loss)
        if self._has_met:  # else the loss is one of several at once, or of an unfinished recovery
            self._num_failed += 1
        self._recent.append(now_s)
        while self._recent[0] < now_s - _HOUR_S:
            self._recent.popleft()
        if repeated:
            return self._end(f"{loss}. The same happened before at this step, so a new attempt would fail too")
        if self._num_failed > self._max_in_row or len(self._losses) > self._max_in_row * self._world_size:
            return self._end(
                f"{loss}. This is loss number {len(self._losses)} without a finished step between them "
                f"(recover.max_in_row={self._max_in_row})"
            )
        if len(self._recent) > PER_HOUR:
            return self._end(f"{loss}. The job had more than {PER_HOUR} recoveries within an hour")
        if len(self._ranks) < self._world_size:
            return self._end(f"{loss}, before all ranks had started")
        self.lines.append(f"{loss}. Its replacement continues in the same job")
        self._plan(now_s)
        self._send_to_node(lost.node, {"kind": "replace", "seat": lost.seat})

    def _stay_unfilled(self, seat: list[object]) -> None:
        """End the job, because the spares of a node have failed and the rank with this seat gets no process."""
        for rank, one in self._ranks.items():
            if one.seat == seat and not one.is_alive:
                self._end(f"rank {rank} on {one.host} cannot be replaced, because the spares there have failed")

    def _plan(self, now_s: float) -> None:
        """Send the next generation to all ranks."""
        self.generation += 1
        self._planned_s = now_s
        self._has_met = False
        plan = {"kind": "plan", "generation": self.generation, "losses": self._losses, "began_s": self._began_s}
        self._send_to_all(plan)

    def _become_ready(self, rank: int, message: Message) -> None:
        """Note that a rank waits for the others. Once all ranks wait, tell them where to meet."""
        generation = int(message["generation"])
        self._ranks[rank].is_alive = True
        self._ranks[rank].ready = generation
        if rank == 0:
            self._port = int(message["port"])
        is_complete = all(one.ready == self.generation for one in self._ranks.values())
        if is_complete and not self._has_met and not self.is_ended:
            self._has_met = True
            self._send_to_all({"kind": "meet", "generation": self.generation, "port": self._port})

    def _finish_step(self, rank: int, generation: int) -> None:
        """Note that a rank has finished a step in a generation. A step of all ranks ends a row of losses."""
        self._ranks[rank].stepped = generation
        if all(one.stepped == self.generation for one in self._ranks.values()):
            self._losses.clear()
            self._num_failed = 0

    def _leave(self, rank: int, code: int) -> None:
        """Note that the process of a rank has ended by itself. An error of its own ends the job."""
        self._ranks[rank].has_left = True
        if code:
            self._fail(rank, code=code, reason=f"exit code {code}")

    def _fail(self, rank: int, *, code: int, reason: str) -> None:
        """End the job with the exit code of a rank that has failed by itself. That rank prints its error."""
        if not self.is_ended:
            self.is_ended = True
            reason = f"rank {rank} on {self._ranks[rank].host} failed: {reason}"
            self._send_to_all({"kind": "end", "code": code, "reason": reason})

    def _judge_regroup(self, now_s: float) -> None:
        """Kill survivors that do not leave their generation in time. End the job if a replacement is missing."""
        waited_s = now_s - self._planned_s
        late = [rank for rank, one in self._ranks.items() if one.ready < self.generation]
        absent = [rank for rank in late if not self._ranks[rank].is_alive]
        if waited_s > REPLACED_S and absent:
            self._end(f"no replacement for {format_ranks(absent)} was ready within {REPLACED_S:g} s")
        elif waited_s > READY_S:
            for rank in late:
                if self._ranks[rank].is_alive:
                    self._kill(rank, f"did not leave generation {self._ranks[rank].ready} within {READY_S:g} s")

    def _find_stuck(self, now_s: float) -> dict[int, str]:
        """Return ranks that are frozen or hang, each with the reason to kill it.

        A silent rank counts as frozen only if another rank makes no progress either. A slow machine is not a frozen
        rank. Ranks in an unfinished generation are judged by `_judge_regroup`, but frozen ranks are found here too.
        """
        statuses = {}
        for rank, one in self._ranks.items():
            if one.status is not None and one.status.limit_s and one.is_alive and not one.has_left:
                late_s = now_s - one.heard_s
                status = one.status
                statuses[rank] = status._replace(silent_s=status.silent_s + late_s, idle_s=status.idle_s + late_s)
        frozen = {}
        for rank, status in statuses.items():
            others = [other.idle_s for number, other in statuses.items() if number != rank]
            is_missed = not others or max(others) > self._silent_s / 2
            if status.silent_s > self._silent_s and is_missed:
                frozen[rank] = f"frozen: no heartbeat for {status.silent_s:.1f} s"
        is_killing = any(one.kill for one in self._ranks.values())
        if frozen or is_killing or not self._has_met:
            return frozen
        if not any(status.idle_s > status.limit_s for status in statuses.values()):
            return {}
        idle = {rank: status for rank, status in statuses.items() if status.idle_s > status.limit_s / 2}
        return {rank: f"hung: no progress for {idle[rank].idle_s:.0f} s" for rank in ranks_waited_for(idle)}

    def _kill(self, rank: int, why: str) -> None:
        """Order the agent of a rank to kill the rank's process, once."""
        if not self._ranks[rank].kill:
            self._ranks[rank].kill = why
            self.outbox.append((rank, {"kind": "kill", "dump": why.startswith("hung")}))

    def _end(self, reason: str) -> None:
        """End the job, and print the reason."""
        if not self.is_ended:
            self.is_ended = True
            self.lines.append(f"the job ends: {reason}. The same command continues from the last checkpoint")
            self._send_to_all({"kind": "end", "code": HANG, "reason": reason})

    def _send_to_all(self, message: Message) -> None:
        for rank in self._ranks:
            self.outbox.append((rank, message))

    def _send_to_node(self, node: str, message: Message) -> None:
        """Send a message to the first agent of a node, which has the spare."""
        first = min(rank for rank, one in self._ranks.items() if one.node == node)
        self.outbox.append((first, message))


def ranks_waited_for(ranks: Mapping[int, Progress]) -> list[int]:
    """Return the ranks for which the other ranks wait.

    These are the ranks at the lowest step. If some of these ranks are outside a collective, only the ranks outside are
    returned.
    """
    lowest = min(one.step for one in ranks.values())
    late = {rank: one for rank, one in ranks.items() if one.step == lowest}
    not_waiting = sorted(rank for rank, one in late.items() if not one.is_waiting)
    return not_waiting or sorted(late)
