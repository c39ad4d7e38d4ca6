"""A rank's end of recovery: its link to the agent, and the way from one generation to the next in the same process.

    steps --an error in a collective, or a newer plan--> cut --> unwind --> `leave` --> ready --> meet --> steps

With recovery the member takes the watchdog's place: the loop's heartbeats go to the status page, which the agent reads,
and the coordinator decides which rank is at fault. A thread writes heartbeats and receives plans. When a plan arrives,
it shuts down the sockets of the present process groups, again and again until the main thread has left. So the main
thread raises an error in its collective, wherever it is, and `regrouping` turns this error into `RegroupError`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from txl_dist.artifacts import LOCK
from txl_dist.console.logging import note_in_file
from txl_dist.distributed.collectives import broadcast_object, get_rank, is_waiting, uses_gpu
from txl_dist.distributed.connection import Message
from txl_dist.distributed.processes import name_process
from txl_dist.distributed.recovery.agent import connect_to
from txl_dist.distributed.recovery.partner import PartnerAddress
from txl_dist.distributed.recovery.seat import GENERATION, Seat, read_seat, seat_of
from txl_dist.distributed.recovery.slot_file import SlotFile
from txl_dist.distributed.recovery.status import StatusPage
from txl_dist.distributed.recovery.verdicts import Loss
from txl_dist.errors import HANG, ConfigError, LostRankError, TxlError, in_one_line
from txl_dist.fault_injection import failpoint
from txl_dist.io.files import open_to_append
from txl_dist.train.engine.regroup import (
    check_regroup,
    device_works,
    end_waits_if,
    import_late_modules,
    leave_groups,
    new_cut,
    set_nccl_variables,
)
from txl_dist.train.engine.zero import import_deepspeed
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.run_lock import RunLock
from txl_dist.train.monitoring.watchdog import is_in_collective, may_come_from_loss

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats on the status page."""
CUT_EVERY_S = 0.05
"""Seconds between two cuts while the main thread has not left its generation."""
MOST_CUTS = 40
"""Number of cuts after which a process whose main thread is still inside a collective kills itself.

`end_waits_if` makes the main thread leave all waits that are known not to end with a cut. This limit is for others, and
for GPUs. No state is lost with the process.
"""
PLAN_S = 5.0
"""Seconds to wait for a plan after an error in a collective, in addition to `recover.silent_s`, because the agent of a
lost rank may be frozen too. Without a plan the error is this rank's own."""
OWN_S = 0.5
"""Seconds to wait for a plan after any other error: another rank may have been lost at the same time."""
CONNECT_S = 1
"""Seconds of one attempt to connect to the store of a generation, which exists already."""
STORE_S = 60
"""Timeout in seconds of the store through which ranks connect. The store exists before any rank connects."""
ASK_EVERY_S = 1.0
"""Seconds between two looks for a request to stop while this rank waits for others."""
_MAX_REASON = 1000
"""Largest number of characters of an error that the coordinator gets."""
_MODULES = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.plugins.hparams.summary_v2",
    "tensorboard.plugins.text.summary_v2",
    "tensorboard.summary.writer.record_writer",
    "txl_dist.train.start",
)
"""Further modules that training imports late. A spare imports them before it is needed."""


class RegroupError(BaseException):
    """Signal that this rank must leave its generation, because another rank was lost.

    It is no `Exception`, so that no handler of errors reports it on its way to the start of the run.
    """


def preload(*, allow_gpu: bool, on_loss: str) -> None:
    """Import everything that training needs, and take it out of the garbage collector's sight.

    A later collection then takes 20 ms and not 300, in which the rank would look frozen. Raises ConfigError if this
    machine or these versions do not support recovery. `allow_gpu` and `on_loss` are settings of `[recover]`.
    """
    set_nccl_variables(os.environ)
    on_gpu = uses_gpu()
    if on_gpu and not allow_gpu:
        raise ConfigError(
            "recover.spares has run on CPUs only so far. Set DS_ACCELERATOR=cpu, or recover.spares to 0. To try it on "
            "GPUs, set recover.allow_gpu to true."
        )
    if on_gpu and on_loss == "shrink":
        raise ConfigError(
            "recover.on_loss=shrink works only on CPUs, because it changes local ranks, and so the GPU of a process. "
            "Set it to stop or wait, or set DS_ACCELERATOR=cpu."
        )
    import_deepspeed()
    check_regroup(on_gpu=on_gpu)
    import_late_modules()
    for name in _MODULES:
        with suppress(ImportError):  # the list is of one version, and what is missing costs time only
            import_module(name)
    if on_gpu and torch.cuda.is_initialized():
        raise ConfigError(
            "recover.spares: an import has started CUDA, so a spare cannot fork a rank. Set recover.spares to 0, and "
            "report this with the output of `txl doctor`."
        )
    gc.collect()
    gc.freeze()


def join_agent() -> Member | None:
    """Connect to the agent that has started this process. Returns None without an agent."""
    seat = read_seat(os.environ)
    if seat is None:
        return None
    member = Member(seat)
    end_waits_if(lambda: member.must_leave)
    # DeepSpeed calls the optimizer for each group of parameters, so between two calls some weights are updated.
    register_optimizer_step_post_hook(lambda *_: _pass_update(member))
    return member


class Member:
    """This rank as a member of the generations of its job. The main thread makes it."""

    def __init__(self, seat: Seat) -> None:
        """Connect to the agent, and start the thread. Raises LostRankError if the agent is gone."""
        self.generation = 1
        self.recovered: Message | None = None
        """Plan of the last recovery, until its first step is reported. None without a recovery."""
        self.has_recorded_start = False
        """Whether the job has recorded its start while this process was a rank. The caller sets it."""
        self.exit_code = 1
        """Exit code with which this process will end. The caller sets it when the run has a result."""
        self._seat = seat
        self._master_address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._main = threading.get_ident()
        self._page = StatusPage(seat.path_of(seat.status))
        self._step = 0
        self._stacks_fd = 2
        self._stacks: Path | None = None
        self._plan: Message = {"generation": 1}
        self._repeat_until = 0
        """Last step up to which the coordinator hears of each finished step: the highest that a lost rank had begun."""
        self._meeting: Message = {"generation": 1}
        self._met_s = 0.0
        self._is_ended = False
        self._end: Message = {"code": HANG, "reason": ""}
        self._condition = threading.Condition()
        self._cut = new_cut()
        self._num_cuts = 0
        self._store: TCPStore | None = None
        self._lock: RunLock | None = None
        self.has_opened = False
        """Whether this process has opened the run directory."""
        try:
            self._agent = connect_to(seat.address)
        except OSError as error:
            raise LostRankError("the agent of this rank is gone. The same command starts again.") from error
        self._tell({"kind": "rank", "pid": os.getpid()})
        name_process(f"txl-rank-{get_rank()}")
        self.beat("start")
        self._page.heartbeat(is_waiting=False)
        self._thread = threading.Thread(target=self._run, name="member", daemon=True)
        self._thread.start()
        if not is_first_process(seat):
            self._wait_for_plan()

    @property
    def step(self) -> int:
        """Training step that the main thread has begun last."""
        return self._step

    @property
    def slots(self) -> list[str]:
        """Paths of the slots for copies of this rank's state."""
        return [self._seat.path_of(slot) for slot in self._seat.slots]

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun: this process has opened its directory, or this rank has stored a state of it."""
        return self.has_opened or any(map(_holds_version, self.slots))

    @property
    def code(self) -> str:
        """Versions of the code when the agent started."""
        return self._seat.code

    @property
    def agent_pid(self) -> int:
        """Pid of the agent, which started with the job."""
        return self._seat.agent

    @property
    def others(self) -> list[str]:
        """Paths of slots on this node whose ranks are no part of the job any more. One rank of the node gets them."""
        seats = [seat_of(seat) for seat in self._plan.get("others", [])]
        return [seat.path_of(slot) for seat in seats for slot in seat.slots]

    @property
    def partner_address(self) -> PartnerAddress | None:
        """Address of the server in this rank's agent that keeps copies for other nodes, or None if there is none."""
        if not self._seat.partner:
            return None
        port, key = self._seat.partner
        return PartnerAddress(_own_host(), int(port), key)

    @property
    def idle_addresses(self) -> list[PartnerAddress]:
        """Addresses of such servers in agents that have no rank. The list is the same on all ranks."""
        idle = self._plan.get("idle", [])
        return [PartnerAddress(host or self._master_address, int(port), key) for host, port, key in idle]

    def beat(self, phase: str, *, step: int | None = None) -> None:
        """Record that the main thread has begun a phase of the step."""
        if step is not None:
            self._step = step
        self._page.progress(step=self._step, phase=phase)

    def limit(self, limit_s: float) -> None:
        """Set the number of seconds without a beat after which this rank counts as hung."""
        self._page.set_limit(limit_s)

    def write_stacks_to(self, folder: Path | None) -> None:
        """Write stack traces to a file in this folder when the agent ends a rank that hangs."""
        if folder is not None and self._stacks is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stacks = folder / f"rank_{get_rank():05d}.txt"
            self._stacks_fd = open_to_append(self._stacks)
        faulthandler.enable(file=self._stacks_fd, all_threads=True)

    def lock(self, run_dir: Path) -> RunLock:
        """Return the lock of the run directory, which rank 0 keeps from one generation to the next.

        The agent of the first rank 0 holds it as long as the job lives, also after another agent got rank 0. Raises
        ConfigError if another job has locked the directory.
        """
        if self._lock is None:
            holder = seat_of(self._plan["holder"]) if "holder" in self._plan else self._seat
            nonce = holder.address.rpartition("-")[2]
            self._lock = RunLock.acquire(run_dir, nonce=nonce, holder_pid=self._seat.agent)
            self._tell({"kind": "lock", "path": str((run_dir / LOCK).resolve())})
        return self._lock

    def close(self) -> None:
        """Announce that this process ends by itself, and that it must not be replaced. Release the lock."""
        self._tell({"kind": "leaving", "code": self.exit_code})
        if self._lock is not None:
            self._lock.release()
        faulthandler.enable(file=2)
        if self._stacks is None:
            return
        with suppress(OSError):  # files of other ranks may be in the folder
            if self._stacks.stat().st_size == 0:
                self._stacks.unlink()
            self._stacks.parent.rmdir()

    def share_coordinator(self) -> None:
        """Give all agents the address of the coordinator, in the first generation. All ranks call it together."""
        if self.generation == 1:
            port, key = broadcast_object(self._seat.coordinator if get_rank() == 0 else ["", ""])
            self._tell({"kind": "coordinator", "host": _meeting_host(), "port": int(port), "key": key})

    def open_store(self) -> Store | None:
        """Return the store through which the ranks of this generation connect. None means the launcher's rendezvous."""
        if self.generation == 1:
            return None
        failpoint("meet", step=self.generation)
        store = self._store or self._connect_to_store()
        return PrefixStore(f"generation{self.generation}", store)

    def _connect_to_store(self) -> TCPStore:
        """Connect to the store in the process of rank 0. Raises OSError if that is not possible.

        While torch connects it cannot be interrupted. So it gets little time, again and again until a newer plan shows
        that rank 0 was lost too.
        """
        host = _meeting_host()
        port = int(self._meeting["port"])
        end_s = time.monotonic() + STORE_S
        while not self._is_superseded() and not self._is_ended and time.monotonic() < end_s:
            with suppress(DistNetworkError, DistStoreError, OSError):
                socket.create_connection((host, port), timeout=CONNECT_S).close()
                timeout = timedelta(seconds=CONNECT_S)
                store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
                store.set_timeout(timedelta(seconds=STORE_S))
                return store
            time.sleep(CUT_EVERY_S)
        raise ConnectionError(f"the store of generation {self.generation} at {host}:{port} is gone")

    @property
    def must_leave(self) -> bool:
        """Whether a newer plan has arrived, or the job ends. From then on collectives may be cut at any moment."""
        return self._is_superseded() or self._is_ended

    def cut(self) -> None:
        """End the collectives of this generation, in which this rank or its device may wait."""
        self._cut.cut()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Return a context manager whose block makes process groups, which a newer plan cuts."""
        with self._cut.collecting():
            yield

    @contextmanager
    def regrouping(self) -> Iterator[None]:
        """Return a context manager that raises RegroupError for an error that the loss of a rank has caused.

        An error of this rank itself ends the job: it is sent to the coordinator, and raised unchanged. LostRankError
        without a message is raised if the job ends because of another rank.
        """
        try:
            yield
        except Exception as error:
            if self._is_caused_by_loss(error):
                raise RegroupError from None
            if self._is_ended and (isinstance(error, LostRankError) or not isinstance(error, TxlError)):
                raise self._ended() from error
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Announce that this rank ends because of its own error, which it prints."""
        code, text = 1, repr(error)
        if isinstance(error, TxlError):
            code, text = error.exit_code, str(error)
        self.exit_code = code
        note_in_file(f"the run ends: {text}")
        self._tell({"kind": "failed", "code": code, "reason": in_one_line(error)[:_MAX_REASON]})

    def _ended(self) -> LostRankError:
        """Return the error of a rank whose job ends because of another rank. It has the exit code of that rank."""
        if self._end["reason"]:
            note_in_file(f"the run ends: {self._end['reason']}")
        error = LostRankError("")  # an empty message is not printed: the other rank or the coordinator prints it
        error.exit_code = self.exit_code = int(self._end["code"])
        return error

    def leave(self, stops: PreemptionRequests, *, stop_file: Path, max_time_s: float) -> None:
        """Leave the present generation, and return when all ranks are ready to meet in the newest one.

        While the job waits for a lost rank, requests to stop are passed on to the coordinator. Then any rank looks for
        the stop file and at the time limit, because rank 0 may be the one that was lost. Later only rank 0 does. If
        this generation is the newest, the method does nothing else. Raises LostRankError if the job ends.
        """
        while self._is_superseded():
            self._begin_generation()
            failpoint("leave", step=self.generation)
            leave_groups()
            if not device_works():
                os.kill(os.getpid(), signal.SIGKILL)  # the agent replaces this process
            self._cut = new_cut()
            port = 0
            if get_rank() == 0:
                with self._cut.collecting():
                    self._store = TCPStore(_meeting_host(), 0, is_master=True, wait_for_workers=False)
                port = self._store.port
            self._tell({"kind": "ready", "generation": self.generation, "port": port})
            asked = ""
            while not self._is_free_in(ASK_EVERY_S):
                reason = stops.reason_with(stop_file=stop_file, max_time_s=max_time_s)
                if reason != asked:
                    self._tell({"kind": "stop", "reason": reason, "withdrawn": asked})
                    asked = reason
            if self._is_ended:
                if asked:  # the job has obeyed, and the file must not stop the next one
                    stops.watch(stop_file=stop_file, max_time_s=max_time_s)
                    with suppress(OSError):
                        stops.clear()
                raise self._ended()
            if self._has_met():
                self._met_s = time.monotonic()
                break
        if get_rank() == 0:
            stops.watch(stop_file=stop_file, max_time_s=max_time_s)

    def _is_free_in(self, seconds: float) -> bool:
        """Wait until all ranks are ready to meet, or this generation is over. Returns False after so many seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self._has_met() or self.must_leave, seconds)

    def mark_loaded(self) -> None:
        """Note that the state of the newest common version is loaded."""
        failpoint("loaded", step=self.generation)
        if self.recovered is not None:
            self.recovered["loaded_s"] = time.monotonic()

    def mark_step(self, step: int, *, continued_from: int) -> dict[str, Any] | None:
        """Note that a step is finished. Returns the facts of a recovery after the first step that follows it, or None.

        `continued_from` is the step after which the generation has continued.
        """
        if step > 1 + max(continued_from, self._repeat_until):
            return None
        if step > continued_from:  # a phase may end again without a step
            self._tell({"kind": "stepped", "generation": self.generation, "step": step})
        plan = self.recovered
        self.recovered = None
        if plan is None:
            return None
        losses = [Loss(*loss) for loss in plan["losses"]]
        loaded_s = plan.get("loaded_s", self._met_s)
        return {
            "generation": self.generation,
            "world_size": int(plan["world_size"]),
            "ranks": [loss.rank for loss in losses],
            "hosts": [loss.host for loss in losses],
            "why": "; ".join(str(loss) for loss in losses),
            "repeated_steps": max(int(plan["reached"]) - continued_from, 0),
            "notice_s": max(loss.notice_s for loss in losses),
            "regroup_s": round(self._met_s - plan["began_s"], 3),
            "restore_s": round(loaded_s - self._met_s, 3),
            "redo_s": round(time.monotonic() - loaded_s, 3),
        }

    def _begin_generation(self) -> None:
        """Take over the newest plan, and note the highest step that this rank or a lost rank has begun.

        The status of a lost agent may be older than the step that its rank had begun, so this rank's own step counts.
        """
        reached = self._step
        if self.recovered is not None:  # the generation before has lost a rank before its first step was reported
            reached = max(reached, int(self.recovered["reached"]))
        with self._condition:
            self.recovered = dict(self._plan)
            self._repeat_until = int(self._plan["repeat_until"])
            self.generation = int(self._plan["generation"])
        losses = [Loss(*loss) for loss in self.recovered["losses"]]
        self.recovered["reached"] = max([reached, *(loss.step for loss in losses)])
        os.environ[GENERATION] = str(self.generation)
        for name in ("rank", "world_size", "local_rank", "local_size"):
            os.environ[name.upper()] = str(self.recovered[name])
        if "LOCAL_WORLD_SIZE" in os.environ:
            os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"]
        os.environ["MASTER_ADDR"] = self.recovered["host"] or self._master_address
        name_process(f"txl-rank-{get_rank()}")
        self.beat("leave")

    def _wait_for_plan(self) -> None:
        """Wait in a replacement for the plan with which it joins. Raises LostRankError if the job ends."""
        with self._condition:
            self._condition.wait_for(lambda: self.must_leave)
        if self._is_ended:
            raise self._ended()

    def _has_met(self) -> bool:
        return bool(self._meeting["generation"] == self.generation) and not self._is_superseded()

    def _is_superseded(self) -> bool:
        return int(self._plan["generation"]) > self.generation

    def _is_caused_by_loss(self, error: Exception) -> bool:
        """Return whether a newer plan explains an error of the main thread. This can take a few seconds."""
        if isinstance(error, TxlError) and not isinstance(error, LostRankError):
            cause = error.__cause__  # a plugin's optimizer may have been in a collective
            if not isinstance(cause, RuntimeError) or not may_come_from_loss(cause):
                return self._is_superseded()
            error = cause
        self._cut.cut()  # the others need not wait for this rank
        self.beat("regroup")
        silent_s = min(self._seat.silent_s, self._page.read().limit_s / 2)  # else this rank counts as hung first
        wait_s = silent_s + PLAN_S if may_come_from_loss(error) else OWN_S
        with self._condition:
            self._condition.wait_for(lambda: self.must_leave, wait_s)
        return self._is_superseded()

    def _tell(self, message: Message) -> None:
        """Send a message to the agent. This process ends if the agent is gone."""
        try:
            self._agent.send(message)
        except OSError:
            os._exit(HANG)

    def _run(self) -> None:
        """Write heartbeats and receive plans, in the thread. If the agent is gone, this process ends."""
        selector = selectors.DefaultSelector()
        selector.register(self._agent.peer, selectors.EVENT_READ)
        while True:
            if selector.select(CUT_EVERY_S if self.must_leave else HEARTBEAT_S):
                try:
                    messages = self._agent.receive()
                except (OSError, ValueError):
                    os._exit(HANG)
                for message in messages:
                    self._receive(message)
            in_collective = is_in_collective(sys._current_frames().get(self._main))
            self._page.heartbeat(is_waiting=is_waiting(self._main) or in_collective)
            if self.must_leave:
                self._cut.cut()
                self._end_if_stuck(in_collective=in_collective)
            else:
                self._num_cuts = 0

    def _end_if_stuck(self, *, in_collective: bool) -> None:
        """Kill this process if many cuts in a row did not end the main thread's collective. The agent replaces it."""
        self._num_cuts = self._num_cuts + 1 if in_collective else 0
        if self._num_cuts > MOST_CUTS and self._is_superseded():
            note_in_file("recovery: a collective does not end, so this process is replaced too")
            os.kill(os.getpid(), signal.SIGKILL)

    def _receive(self, message: Message) -> None:
        """Act on a message of the agent, in the thread."""
        with self._condition:
            if message["kind"] == "plan":
                self._plan = message
            elif message["kind"] == "meet":
                self._meeting = message
            elif message["kind"] == "end":
                self._end = message
                self._is_ended = True
            self._condition.notify_all()


def _pass_update(member: Member) -> None:
    failpoint("updating", step=member.step)


def _holds_version(path: str) -> bool:
    """Return whether the slot at this path holds a version."""
    slot = SlotFile(path)
    try:
        return slot.head.serial > 0
    finally:
        slot.close()


def lock_run(run_dir: Path, stack: ExitStack, member: Member | None) -> RunLock:
    """Lock the run directory, on rank 0. Raises ConfigError if another job has locked it.

    Without recovery the lock is released at the end of `stack`. With recovery the member keeps it until the job ends.
    """
    if member is not None:
        return member.lock(run_dir)
    lock = RunLock.acquire(run_dir)
    stack.callback(lock.release)
    return lock


def is_first_process(seat: Seat) -> bool:
    """Return whether this process is the first of its rank, and no replacement. The agent is the parent of the first
    one only."""
    return os.getppid() == seat.agent


def _meeting_host() -> str:
    """Return the address of the node of rank 0."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _own_host() -> str:
    """Return the address at which the processes of other nodes reach this node."""
    host = _meeting_host()
    family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing, and chooses the network interface
        own: str = probe.getsockname()[0]
    if own.startswith("127.") or own == "::1":
        return host  # this is the node of rank 0
    return own
