"""The coordinator of recovery: hears all agents, and decides which ranks are replaced and when the ranks meet.

    agent -> coordinator    hello, status, started, died, unfilled, ready, stepped, failed, left, stop
    coordinator -> agent    welcome, heard, plan, replace, meet, kill, stop, end

    all run --a rank is lost--> plan g + 1 to all --every rank is ready--> meet --all made a step--> all run

A generation is one membership of the job: ranks, each held by the process of one agent. Each loss begins a new
generation, and a newer generation supersedes an unfinished one. Ranks only connect to each other after every rank has
said that it is ready, so no rank waits for a process that does not exist.

A lost rank gets a process of the spare on its node. If that fails, or if its agent is lost too, an agent without a rank
takes the rank, rather one on another node. If there is none, `recover.on_loss` decides:

    stop      the job ends
    wait      the generation stays open until the spare works again, or an agent connects in place of the lost one.
              A request to stop ends the job meanwhile
    shrink    the ranks are numbered again, the largest number of them that divides the lanes. Further agents are idle

The job ends in any case if a loss repeats itself, because the next attempt would fail too: a batch that kills its rank,
or memory that is too small. It also ends after too many losses in a row. `verdicts` has these judgements.

An agent that was cut off from the coordinator may still run its rank, which must not write what its successor writes
too. So the coordinator confirms the statuses of agents on other nodes (`heard`), and an agent whose newest confirmed
status is `silent_s` old kills its rank. This happens before the coordinator counts the agent as lost, because the
coordinator has received that status after it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from txl_dist.console.formatting import counted
from txl_dist.distributed.connection import Message, encode_shared
from txl_dist.distributed.rank_environment import format_ranks
from txl_dist.distributed.recovery.status import Status
from txl_dist.distributed.recovery.verdicts import (
    AGENT_LOST,
    Loss,
    aged,
    find_frozen,
    find_hung,
    is_missed,
    still_possible,
    why_not_again,
)
from txl_dist.errors import HANG, in_one_line
from txl_dist.io.files import typed

KILLED_S = 20.0
"""Seconds within which a process must end after SIGKILL. Then its rank counts as lost, before the other ranks give up:
gloo ends their collectives 30 s after a hang is found. A process inside the kernel may not end, for instance with a
network file system that does not answer."""
READY_S = 30.0
"""Seconds that a survivor has, after a plan, to leave its generation. Then its process is killed and replaced."""
REPLACED_S = 300.0
"""Seconds within which a replacement must be ready. A spare that has imported everything needs a fraction of one, but
the spare of a node that has just joined imports first."""
SAY_EVERY_S = 60.0
"""Seconds between two lines about ranks that the job waits for."""
HEARD_EVERY_S = 0.5
"""Seconds between two confirmations of an agent's statuses."""
_HOUR_S = 3600.0
_NOT_STARTED = Status(0.0, 0.0, 0.0, 0, "start", is_waiting=False)
"""Status of a rank before its first report."""


class MessageError(ValueError):
    """Message of an agent that the coordinator cannot use."""


class RefusedError(MessageError):
    """Greeting of an agent whose settings or code are not those of the job."""


class Outgoing(NamedTuple):
    """Message of the coordinator that is to be delivered."""

    number: int
    """Number of the agent that gets the message."""
    message: Message
    shared: bytes = b""
    """Further values of the message, from `encode_shared`. They are the same object in the plans of all agents."""


@dataclass
class _Agent:
    """State of one agent and of its rank in the coordinator."""

    host: str
    node: str
    address: str
    """Network address of the agent's node, as the coordinator sees it."""
    seat: list[object]
    pid: int
    partner: list[object]
    """[port, key] of the agent's server of copies. Empty with recover.copies=node."""
    process: object
    """Identity of the agent's process, as JSON values."""
    settings_hash: str
    """Hash of the settings that all agents must have in common."""
    code: str
    """Versions of the agent's code. All agents must have the same."""
    heard_s: float
    """Time at which the last status, or the greeting, was received."""
    rank: int = -1
    """Rank that the agent's process is, or -1 if the agent has no rank."""
    status: Status = _NOT_STARTED
    confirmed_s: float = 0.0
    """Time at which a status was last confirmed."""
    is_silent: bool = False
    """Whether the agent has no rank and was not heard of for too long. It gets none before it is heard of again."""
    is_connected: bool = True
    is_alive: bool = True
    """Whether the rank has a process."""
    started_s: float = 0.0
    """Time at which a replacement has connected to the agent."""
    is_unfilled: bool = False
    """Whether the rank has no process, and its node gives it none: its agent was lost, its spares have failed, or no
    replacement came in time."""
    ready: int = 1
    """Generation for which the rank is ready to meet."""
    stepped: int = 0
    """Generation in which the rank has finished a step."""
    last_step: int = 0
    """Last finished step that the rank has reported: the first one of a generation, or a repeated one."""
    has_left: bool = False
    kill: str = ""
    """Reason for which the coordinator has ordered the process to be killed, or an empty text."""
    killed_s: float = 0.0
    """Time of this order."""
    is_stuck: bool = False
    """Whether the rank counts as lost because its process did not end after that. It gets no other one before."""

    @property
    def is_idle(self) -> bool:
        """Whether the agent has no rank. It may hold copies of earlier generations."""
        return self.rank < 0 and self.is_connected

    @property
    def is_free(self) -> bool:
        """Whether the agent can get a rank."""
        return self.is_idle and not self.is_unfilled and not self.is_silent


class Coordinator:
    """State machine of recovery. The caller delivers the messages of `take_messages` after each call, or each few.

    Agents have the numbers that the launcher gave to their processes. At the start these are the ranks.
    """

    def __init__(
        self, world_size: int, *, silent_s: float, max_in_row: int, on_loss: str = "stop", max_ranks: int = 1
    ) -> None:
        """Start with no agent.

        `silent_s` is the number of seconds without a heartbeat after which a rank counts as frozen. The job ends after
        more than `max_in_row` failed generations without a finished step between them. `on_loss` says what happens when
        a rank cannot be replaced: stop, wait or shrink. A smaller number of ranks must divide `max_ranks`.
        """
        self.lines: list[str] = []
        """Lines for people that the caller prints."""
        self.dropped: list[int] = []
        """Agents that count as lost, whose connections the caller closes."""
        self.silent_here: list[object] = []
        """Processes of silent agents on the coordinator's node that count as lost. The caller kills them at its end,
        because a launcher would wait for a stopped agent forever."""
        self.generation = 1
        self._world_size = world_size
        self._silent_s = silent_s
        self._max_in_row = max_in_row
        self._on_loss = on_loss
        self._max_ranks = max_ranks
        self._agents: dict[int, _Agent] = {}
        self._outbox: list[Outgoing] = []
        self._plan_at: int | None = None  # place in `_outbox` of the plans that are due
        self._losses: list[Loss] = []  # losses that may come again in the same way
        self._planned: list[Loss] = []  # losses since the last finished step, new or repeated
        self._num_failed = 0  # generations that lost a rank since then
        self._failed_generation = 0  # last generation that `_num_failed` has counted
        self._recent: deque[float] = deque()  # times of the recoveries within the last hour
        self._planned_s = 0.0
        self._began_s = 0.0  # time of the first loss in `_planned`
        self._has_met = True
        self._met_s = 0.0  # time since which the ranks of this generation may connect to each other
        self._is_complete = False  # whether all ranks have had an agent
        self._port = 0
        self._say_s = 0.0  # time of the next line about ranks that the job waits for
        self._stops: dict[str, set[int]] = {}
        """Requests to stop the job, for instance SIGTERM, with the agents that sent them. The first one is first."""
        self._ending: Message | None = None
        """Message that has ended the job, for agents that come later."""

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended: the run is done, or the job cannot continue."""
        return self._ending is not None

    def take_messages(self) -> list[Outgoing]:
        """Return the messages to deliver since the last call.

        Losses that were noticed since then have one plan together. So the plans of many losses cost little.
        """
        if self._plan_at is not None and not self.is_ended:
            self._outbox[self._plan_at : self._plan_at] = self._plans()
        self._plan_at = None
        messages = self._outbox
        self._outbox = []
        return messages

    def receive(self, number: int, message: Message, now_s: float) -> None:
        """Act on a message of an agent. Raises MessageError for a message that cannot be used, which changes nothing:
        RefusedError for the greeting of an agent with other settings or other code.

        Any other error is a fault of the coordinator itself.
        """
        try:
            act = self._action(number, message, now_s)
        except RefusedError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(in_one_line(error)) from error
        act()

    def _action(self, number: int, message: Message, now_s: float) -> Callable[[], None]:
        """Return what a message makes the coordinator do. Raises KeyError, TypeError or ValueError if it is malformed.

        All values of the message are read and checked here, before anything is changed.
        """
        kind = message["kind"]
        if kind == "hello":
            return partial(self._greet, number, self._new_agent(number, message, now_s), now_s)
        if kind == "status":
            return partial(self._hear, number, typed(Status, message["status"]), message.get("sent_s"), now_s)
        if kind == "started":
            return partial(self._start, number, int(message["pid"]), now_s)
        if kind == "died":
            return partial(self._lose, number, str(message["cause"]), typed(Status, message["status"]), now_s)
        if kind == "unfilled":
            return partial(self._stay_unfilled, list(message["seat"]), now_s)
        if kind == "ready":
            return partial(self._become_ready, number, int(message["generation"]), int(message["port"]), now_s)
        if kind == "stepped":
            return partial(self._finish_step, number, int(message["generation"]), step=int(message["step"]))
        if kind == "failed":
            return partial(self._fail, number, code=int(message["code"]), reason=str(message["reason"]))
        if kind == "left":
            return partial(self._leave, number, int(message["code"]))
        if kind == "stop":
            return partial(self._note_stop, number, str(message["reason"]), withdrawn=str(message["withdrawn"]))
        raise ValueError(f"the message {kind!r} is unknown")

    def lose_agent(self, number: int, now_s: float) -> None:
        """Act on the end of an agent, and of its rank's process and slots with it."""
        self._lose_agents([number], now_s)

    def _lose_agents(self, numbers: Sequence[int], now_s: float) -> None:
        """Act on the end of agents at once, for instance of all agents of a node."""
        why = ""
        for number in numbers:
            lost = self._agents[number]
            was_connected = lost.is_connected
            lost.is_connected = False
            if not was_connected or lost.has_left or lost.rank < 0 or self.is_ended:
                continue
            why = f"the agent of rank {lost.rank} on {lost.host} was lost, and its rank with it"
            if not self._is_complete:
                self.end(why)
                return
            lost.is_unfilled = True
            if self._note_loss(lost, AGENT_LOST, aged(lost.status, now_s - lost.heard_s), now_s) is None:
                return
        if why:
            nodes = {self._agents[number].node for number in numbers}
            here = [number for number, agent in self._agents.items() if agent.node in nodes]
            if self._agents[0].node not in nodes:  # from the launcher, which ends a node that has lost an agent
                self._withdraw("SIGTERM", here)
            for number in here:
                agent = self._agents[number]
                is_absent = agent.rank >= 0 and not (agent.is_alive or agent.is_unfilled or agent.is_stuck)
                if agent.is_connected and is_absent:
                    self._send_to_node(agent.node, {"kind": "replace", "seat": agent.seat})  # the spare may be lost too
            self._replace_elsewhere(why, now_s)

    def tick(self, now_s: float) -> None:
        """Find agents that are silent, and ranks that are frozen or hang, or that do not become ready. Call it a few
        times per second."""
        if self.is_ended or not self._is_complete:
            return
        self._find_silent(now_s)
        self._give_up_killed(now_s)
        if not self._has_met:
            self._judge_regroup(now_s)
        for number, why in self._find_stuck(now_s).items():
            self._kill(number, why, now_s)

    def excuse(self, seconds: float, now_s: float) -> None:
        """Note that the caller did not run for so many seconds. No agent counts as silent because of this pause."""
        for agent in self._agents.values():
            agent.heard_s = min(now_s, agent.heard_s + seconds)

    def end(self, reason: str) -> None:
        """End the job, and print the reason."""
        if not self.is_ended:
            self.lines.append(f"the job ends: {reason}. The same command continues from the last checkpoint")
            self._ending = {"kind": "end", "code": HANG, "reason": reason}
            self._send_to_all(self._ending)

    def _hear(self, number: int, status: Status, sent_s: object, now_s: float) -> None:
        """Note the status of an agent. Confirm it with `sent_s`, unless this is None."""
        agent = self._agents[number]
        agent.status = status
        agent.heard_s = now_s
        if sent_s is not None and now_s >= agent.confirmed_s + HEARD_EVERY_S:
            agent.confirmed_s = now_s
            self._send(number, {"kind": "heard", "sent_s": sent_s})
        if agent.is_silent:
            agent.is_silent = False
            self.lines.append(f"agent {number} on {agent.host} answers again")
            if any(other.is_unfilled for other in self._ranked.values()):
                self._replace_elsewhere("", now_s)

    def _find_silent(self, now_s: float) -> None:
        """Count silent agents as lost if the others wait for their ranks. Note silent agents without a rank."""
        statuses = self._statuses(now_s)
        silent = []
        for number, agent in self._agents.items():
            if not agent.is_connected or agent.has_left or now_s - agent.heard_s <= self._silent_s:
                continue
            if agent.rank < 0:
                if not agent.is_silent:
                    self.lines.append(
                        f"agent {number} on {agent.host}, which has no rank, was silent for {self._silent_s:g} s. "
                        "It gets no rank until it answers again"
                    )
                agent.is_silent = True
            elif not self._has_met or is_missed(number, statuses, silent_s=self._silent_s):
                self.lines.append(f"the agent of rank {agent.rank} was silent for {self._silent_s:g} s")
                silent.append(number)
                if agent.node == self._agents[0].node:
                    self.silent_here.append(agent.process)
        self.dropped += silent
        self._lose_agents(silent, now_s)

    @property
    def _ranked(self) -> dict[int, _Agent]:
        """Agents that have a rank, in the order of the ranks."""
        ranked = [(number, agent) for number, agent in self._agents.items() if agent.rank >= 0]
        return dict(sorted(ranked, key=lambda entry: entry[1].rank))

    def _new_agent(self, number: int, message: Message, now_s: float) -> _Agent:
        """Return an agent that greets. Raises KeyError for a malformed message, ValueError if it is here already, and
        RefusedError if its settings or its code are others than those of agent 0."""
        settings_hash, code = message["settings_hash"], message["code"]
        if 0 in self._agents:
            first = self._agents[0]
            if code != first.code:
                raise RefusedError(f"it has {code}, but the job runs {first.code}. Install the versions of the job")
            if settings_hash != first.settings_hash:
                raise RefusedError(
                    "its settings are not those of the job. Start it with the configuration file and the options of "
                    "the job"
                )
        earlier = self._agents.get(number)
        if earlier is not None and earlier.is_connected:
            raise ValueError(f"agent {number} is already connected")
        return _Agent(
            host=message["host"],
            node=message["node"],
            address=message["address"],
            seat=message["seat"],
            pid=int(message["pid"]),
            process=message["process"],
            settings_hash=settings_hash,
            code=code,
            partner=message["partner"],
            heard_s=now_s,
        )

    def _greet(self, number: int, agent: _Agent, now_s: float) -> None:
        """Take an agent into the job: at the start, or later without a rank, or in place of a lost one."""
        earlier = self._agents.get(number)
        self._agents[number] = agent
        if self._ending is not None:
            self._send(number, self._ending)
            return
        if not self._is_complete and number < self._world_size:
            agent.rank = number
            self._is_complete = len(self._ranked) == self._world_size
            self._met_s = now_s  # a rank that has waited long for the last one has not hung
            return
        agent.is_alive = agent.pid > 0
        self._send(number, {"kind": "welcome"})
        self.lines.append(f"agent {number} on {agent.host} has joined the job")
        if earlier is not None and earlier.rank >= 0:
            agent.rank = earlier.rank
            agent.ready = 0
            self.lines.append(f"rank {agent.rank} continues on {agent.host}")
            self._plan(now_s)
            self._send_to_node(agent.node, {"kind": "replace", "seat": agent.seat})
        elif any(other.is_unfilled for other in self._ranked.values()):
            self._replace_elsewhere("", now_s)

    def _start(self, number: int, pid: int, now_s: float) -> None:
        """Note that a rank has a process. A replacement whose agent has lost its rank meanwhile is killed."""
        agent = self._agents[number]
        agent.pid = pid
        agent.is_unfilled = False
        agent.is_stuck = False
        agent.kill = ""  # an order to kill was about the process before
        if agent.rank < 0:
            self._send(number, {"kind": "kill", "dump": False})
            return
        agent.is_alive = True
        agent.started_s = now_s

    def _lose(self, number: int, cause: str, status: Status, now_s: float) -> None:
        """Begin a new generation without the process of a rank that died, or end the job."""
        lost = self._agents[number]
        if lost.rank < 0:  # the job continues without it
            lost.is_alive = False
            return
        if lost.is_stuck:  # its loss was counted before
            lost.is_stuck = False
            self._planned_s = now_s  # its replacement has the whole time
            self._send_to_node(lost.node, {"kind": "replace", "seat": lost.seat})
            return
        loss = self._note_loss(lost, lost.kill or cause, status, now_s)
        if loss is not None:
            self.lines.append(f"{loss}. Its replacement continues in the same job")
            self._plan(now_s)
            self._send_to_node(lost.node, {"kind": "replace", "seat": lost.seat})

    def _give_up_killed(self, now_s: float) -> None:
        """Count ranks as lost whose processes do not end although they were killed. The others wait for their end."""
        for agent in self._ranked.values():
            is_late = agent.kill and now_s > agent.killed_s + KILLED_S
            if is_late and not agent.has_left and not self.is_ended:
                cause = f"{agent.kill}, and SIGKILL did not end it within {KILLED_S:g} s"
                loss = self._note_loss(agent, cause, aged(agent.status, now_s - agent.heard_s), now_s)
                if loss is not None:
                    agent.is_stuck = True
                    self.lines.append(f"{loss}. It is replaced after its process has ended")
                    self._plan(now_s)

    def _note_loss(self, lost: _Agent, cause: str, status: Status, now_s: float) -> Loss | None:
        """Note that a rank has no process any more. Returns None if the job ends."""
        # A rank that hangs still sends heartbeats.
        notice_s = status.idle_s if cause.startswith("hung") else status.silent_s
        if self._planned:
            notice_s = max(0.0, notice_s - (now_s - self._began_s))
        loss = Loss(lost.rank, lost.host, lost.pid, cause, status.step, status.phase, round(notice_s, 3))
        lost.is_alive = False
        lost.ready = 0  # the others may wait for it in this same generation
        lost.kill = ""
        lost.status = _NOT_STARTED
        if self.is_ended:
            return None
        if any(agent.has_left for agent in self._ranked.values()):
            self.lines.append(f"{loss}, after the end of the run")
            self._finish()
            return None
        if not self._planned:
            self._began_s = now_s
        # Other losses belong to the same recovery: ranks lost at once, as those of a node, or lost again meanwhile.
        if self._has_met and self._failed_generation < self.generation:
            self._failed_generation = self.generation
            self._num_failed += 1
            self._recent.append(now_s)
        while self._recent and self._recent[0] < now_s - _HOUR_S:
            self._recent.popleft()
        num_attempts = 1 + sum(other.rank == loss.rank for other in self._planned)  # its replacements were lost too
        reason = why_not_again(
            loss,
            self._losses,
            num_in_row=len(self._planned) + 1,
            num_failed=max(self._num_failed, num_attempts),
            max_in_row=self._max_in_row,
            world_size=self._world_size,
            num_recent=len(self._recent),
        )
        self._losses.append(loss)
        self._planned.append(loss)
        if not reason and not self._is_complete:
            reason = f"{loss}, before all ranks had started"
        if reason:
            self.end(reason)
            return None
        return loss

    def _stay_unfilled(self, seat: list[object], now_s: float) -> None:
        """Act on the failure of the spares of a node: the rank with this seat gets no process there."""
        for agent in self._ranked.values():
            if agent.seat == seat and not agent.is_alive and not self.is_ended:
                agent.is_unfilled = True
                where = f"rank {agent.rank} on {agent.host}"
                self._replace_elsewhere(f"{where} cannot be replaced, because the spares there have failed", now_s)

    def _replace_elsewhere(self, why: str, now_s: float) -> None:
        """Give the ranks without a process to agents without a rank, or do what `on_loss` says.

        Nodes whose spares have failed get no rank. `why` is a sentence about the rank that was lost last.
        """
        missing = {number: agent for number, agent in self._ranked.items() if agent.is_unfilled}
        failed_nodes = {agent.node for agent in missing.values() if agent.is_connected}
        free = [agent for agent in self._agents.values() if agent.is_free and agent.node not in failed_nodes]
        lost_nodes = {agent.node for agent in missing.values()}  # more of their agents may be lost
        free.sort(key=lambda agent: agent.node in lost_nodes)
        if len(free) >= len(missing):
            self._move(list(missing.values()), free, now_s)
        elif self._on_loss == "shrink" and (size := self._smaller_size()):
            self._shrink(size, why, now_s)
        elif self._on_loss == "wait":
            self._say_s = now_s
            if self._has_met:
                self._plan(now_s)
        else:
            self.end(why)

    def _move(self, missing: Sequence[_Agent], free: Sequence[_Agent], now_s: float) -> None:
        """Give each missing rank to a free agent. There are enough of them."""
        for lost, taker in zip(missing, free, strict=False):
            self.lines.append(f"rank {lost.rank} on {lost.host} continues on {taker.host}")
            taker.rank = lost.rank
            taker.ready = 0
            taker.is_alive = False
            lost.rank = -1
            lost.is_stuck = False
        self._plan(now_s)
        for taker in free[: len(missing)]:
            self._send_to_node(taker.node, {"kind": "replace", "seat": taker.seat})

    def _smaller_size(self) -> int:
        """Return the largest number of ranks that the agents with a process, or with a spare, allow. 0 if none."""
        num_staying = sum(not agent.is_unfilled for agent in self._ranked.values())
        return max((size for size in range(1, num_staying + 1) if self._max_ranks % size == 0), default=0)

    def _shrink(self, size: int, why: str, now_s: float) -> None:
        """Continue with `size` ranks. The ranks are numbered again in their order, and further agents become idle.

        Ranks with a process stay rather than ranks that wait for a replacement, which may fail too.
        """
        before = self._world_size
        able = [agent for agent in self._ranked.values() if not agent.is_unfilled]
        by_process = sorted(able, key=lambda agent: (not agent.is_alive, agent.rank))
        staying = sorted(by_process[:size], key=lambda agent: agent.rank)
        for agent in self._ranked.values():
            agent.rank = -1
            agent.is_stuck = False
        for rank, agent in enumerate(staying):
            agent.rank = rank
        for agent in by_process[size:]:  # their agents kill them
            agent.is_alive = False
            agent.kill = ""
            agent.status = _NOT_STARTED
        self._world_size = size
        self.lines.append(f"{why}. The job continues with {size} of {counted(before, 'rank')}")
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        """Begin the next generation. All agents get its plan with the next messages."""
        self.generation += 1
        self._planned_s = now_s
        self._has_met = False
        self._plan_at = len(self._outbox)

    def _plans(self) -> list[Outgoing]:
        """Return the plan of this generation for each agent.

        With 1,000 ranks lost at once a plan has 80 KB. All but a few values are the same for all agents, so these are
        encoded once.
        """
        ranked = self._ranked
        ranks_of: dict[str, list[int]] = {}
        for agent in ranked.values():
            ranks_of.setdefault(agent.node, []).append(agent.rank)
        idle = [
            (self._host_of(agent), *agent.partner)
            for agent in self._agents.values()
            if agent.is_idle and agent.partner and self._planned_s - agent.heard_s <= self._silent_s / 2
        ]
        common = {
            "generation": self.generation,
            "losses": list(self._planned),
            "repeat_until": self._repeat_until,
            "began_s": self._began_s,
            "world_size": len(ranked),
            "host": self._host_of_rank0(),
            "idle": idle,
            "holder": self._agents[0].seat,
        }
        shared = encode_shared(common)
        plans = []
        for number, agent in self._agents.items():
            neighbours = ranks_of.get(agent.node, [])
            is_first = bool(neighbours) and agent.rank == neighbours[0]
            own = {
                "kind": "plan",
                "rank": agent.rank,
                "local_rank": neighbours.index(agent.rank) if agent.rank >= 0 else -1,
                "local_size": len(neighbours),
                "others": self._idle_seats(agent.node) if is_first else [],
            }
            plans.append(Outgoing(number, own, shared))
        return plans

    def _host_of_rank0(self) -> str:
        return self._host_of(next(iter(self._ranked.values())))

    def _host_of(self, agent: _Agent) -> str:
        """Return the network address of an agent's node. Empty for the node of the coordinator."""
        return "" if agent.node == self._agents[0].node else agent.address

    def _idle_seats(self, node: str) -> list[list[object]]:
        """Return the seats on a node that hold no rank. Their slots may hold state of an earlier generation."""
        return [agent.seat for agent in self._agents.values() if agent.node == node and agent.is_idle]

    def _become_ready(self, number: int, generation: int, port: int, now_s: float) -> None:
        """Note that a rank waits for the others. Once all ranks wait, tell them where to meet."""
        agent = self._agents[number]
        if not agent.is_alive:  # a late message of a process that has died
            return
        agent.ready = generation
        if agent.rank == 0:
            self._port = port
        ranked = self._ranked
        is_complete = all(other.ready == self.generation for other in ranked.values())
        if is_complete and not self._has_met and not self.is_ended:
            self._has_met = True
            self._met_s = now_s
            self._send_to_all({"kind": "meet", "generation": self.generation, "port": self._port})

    def _finish_step(self, number: int, generation: int, *, step: int) -> None:
        """Note that a rank has finished a step in a generation.

        Losses are kept for comparison as long as what killed a rank may come again (`still_possible`).
        """
        reporter = self._agents[number]
        reporter.stepped, reporter.last_step = generation, step
        ranked = self._ranked.values()
        if any(agent.stepped != self.generation for agent in ranked):
            return
        self._planned.clear()
        self._num_failed = 0
        self._losses = still_possible(self._losses, finished=min(agent.last_step for agent in ranked))

    @property
    def _repeat_until(self) -> int:
        """Highest step that a rank of `_losses` had begun."""
        return max((loss.step for loss in self._losses), default=0)

    def _leave(self, number: int, code: int) -> None:
        """Note that the process of a rank has ended by itself. An error of its own ends the job.

        A rank that has lost another one after the end of the run does not wait for it.
        """
        self._agents[number].has_left = True
        if code:
            self._fail(number, code=code, reason=f"exit code {code}")
        elif not self._has_met or all(agent.has_left for agent in self._ranked.values()):
            self._finish()

    def _finish(self) -> None:
        """Note that the run is done, and let the other agents end. Ranks leave together, so all have finished the run
        once one has left."""
        if self.is_ended:
            return
        self._ending = {"kind": "end", "code": 0, "reason": ""}
        for number, agent in self._agents.items():
            if agent.is_connected and not agent.has_left:
                self._send(number, self._ending)

    def _fail(self, number: int, *, code: int, reason: str) -> None:
        """End the job with the exit code of a rank that has failed by itself. That rank prints its error."""
        if not self.is_ended:
            agent = self._agents[number]
            reason = f"rank {agent.rank} on {agent.host} failed: {reason}"
            self._ending = {"kind": "end", "code": code, "reason": reason}
            self._send_to_all(self._ending)

    def _note_stop(self, number: int, reason: str, *, withdrawn: str) -> None:
        """Note a request to stop the job, in place of an earlier one. Either text may be empty.

        A rank obeys the request of its own agent. That of an agent without a rank goes to rank 0, once. It does not
        count if another agent of the node was lost, because then the launcher ends this node and not the job.
        """
        sender = self._agents[number]
        if sender.rank < 0 and any(
            not agent.is_connected for agent in self._agents.values() if agent.node == sender.node
        ):
            return
        self._withdraw(withdrawn, [number])
        if reason:
            is_new = reason not in self._stops
            self._stops.setdefault(reason, set()).add(number)
            if is_new and sender.rank < 0 and not self.is_ended:
                self._send(next(iter(self._ranked)), {"kind": "stop"})

    def _withdraw(self, reason: str, senders: Iterable[int]) -> None:
        """Forget a request to stop of these agents. The text may be empty."""
        remaining = self._stops.get(reason, set()).difference(senders)
        if remaining:
            self._stops[reason] = remaining
        else:
            self._stops.pop(reason, None)

    def _judge_regroup(self, now_s: float) -> None:
        """Kill survivors that do not leave their generation in time. Give up a replacement that is missing too long."""
        waited_s = now_s - self._planned_s
        late = {number: agent for number, agent in self._ranked.items() if agent.ready < self.generation}
        absent = [agent for agent in late.values() if not agent.is_alive and not agent.is_unfilled]
        if waited_s > REPLACED_S and absent:
            for agent in absent:
                agent.is_unfilled = True
            names = format_ranks([agent.rank for agent in absent])
            self._replace_elsewhere(f"no replacement for {names} was ready within {REPLACED_S:g} s", now_s)
        for number, agent in late.items():
            if agent.is_alive and now_s - max(self._planned_s, agent.started_s) > READY_S:
                self._kill(number, f"did not leave generation {agent.ready} within {READY_S:g} s", now_s)
        self._judge_waiting(now_s)

    def _judge_waiting(self, now_s: float) -> None:
        """While the job waits for ranks, say so every minute and ask for them again. End it if it was asked to stop.

        A replacement that is expected gets `READY_S` seconds, because all ranks obey the request after it has come.
        """
        unfilled = {number: agent for number, agent in self._ranked.items() if agent.is_unfilled}
        missing = list(unfilled.values())
        if now_s > self._planned_s + READY_S:
            missing = [agent for agent in self._ranked.values() if not agent.is_alive]
        where = ", ".join(f"rank {agent.rank} on {agent.host}" for agent in missing)
        if missing and self._stops and not self.is_ended:
            self.end(f"it was asked to stop by {next(iter(self._stops))} while it waited for {where}")
        elif unfilled and now_s >= self._say_s and not self.is_ended:
            self._say_s = now_s + SAY_EVERY_S
            waited_min = round((now_s - self._planned_s) / 60)
            so_far = f", for {waited_min} min so far" if waited_min else ""
            lost = [f"RANK={number}" for number, agent in unfilled.items() if not agent.is_connected]
            again = "Its spare is tried again"
            stuck = [f"pid {agent.pid} on {agent.host}" for agent in unfilled.values() if agent.is_stuck]
            if stuck:
                again = f"SIGKILL does not end {' and '.join(stuck)}"
            if lost:
                again = f"Start {' and '.join(lost)} again with the command of the run"
            end = "To end the job, send SIGTERM to its processes, or create the file STOP in the run directory"
            self.lines.append(f"the job waits for {where}{so_far}. {again}. {end}")
            for agent in unfilled.values():
                if agent.is_connected and not agent.is_stuck:
                    self._send_to_node(agent.node, {"kind": "replace", "seat": agent.seat})

    def _statuses(self, now_s: float) -> dict[int, Status]:
        """Return the present statuses of the ranks that have started and not ended, by agent."""
        statuses = {}
        for number, agent in self._ranked.items():
            if agent.status.limit_s and agent.is_alive and not agent.has_left:
                statuses[number] = aged(agent.status, now_s - agent.heard_s)
        return statuses

    def _find_stuck(self, now_s: float) -> dict[int, str]:
        """Return agents whose ranks are frozen or hang, each with the reason to kill the rank's process.

        In an unfinished generation only frozen ranks are found here. `_judge_regroup` finds those that are late.
        """
        statuses = self._statuses(now_s)
        frozen = find_frozen(statuses, silent_s=self._silent_s)
        is_killing = any(agent.kill for agent in self._agents.values())
        if frozen or is_killing or not self._has_met:
            return frozen
        return find_hung(statuses, met_for_s=now_s - self._met_s)

    def _kill(self, number: int, why: str, now_s: float) -> None:
        """Order an agent to kill its rank's process, once. An agent that has lost its rank meanwhile needs no order."""
        agent = self._agents[number]
        if agent.rank >= 0 and not agent.kill:
            agent.kill = why
            agent.killed_s = now_s
            self._send(number, {"kind": "kill", "dump": not why.startswith("frozen")})

    def _send(self, number: int, message: Message) -> None:
        self._outbox.append(Outgoing(number, message))

    def _send_to_all(self, message: Message) -> None:
        for number in self._agents:
            self._send(number, message)

    def _send_to_node(self, node: str, message: Message) -> None:
        """Send a message to the first agent of a node, which has the spare."""
        first = min(number for number, agent in self._agents.items() if agent.node == node and agent.is_connected)
        self._send(first, message)
