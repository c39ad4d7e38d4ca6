"""Agents whose ranks are small programs without torch: they are replaced, meet again, and end with the right codes."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from txl_dist.artifacts import STOP
from txl_dist.cli.main import _train_arguments
from txl_dist.distributed.connection import Connection
from txl_dist.distributed.processes import ProcessId, process_id
from txl_dist.distributed.recovery.agent import BEGIN_S, CAUSE_S, Agent, _config_copy
from txl_dist.distributed.recovery.coordinator import Coordinator
from txl_dist.distributed.recovery.job_file import JobAddress, publish_job
from txl_dist.distributed.recovery.seat import CONFIG_COPY, AgentOptions
from txl_dist.distributed.recovery.server import CoordinatorServer
from txl_dist.distributed.recovery.spare_process import SpareProcess
from txl_dist.distributed.recovery.status import StatusPage
from txl_dist.distributed.recovery.verdicts import AGENT_LOST, Loss
from txl_dist.errors import HANG
from txl_dist.version import code_version

AGENT = """
import os, subprocess, sys
from txl_dist.distributed.recovery import agent, coordinator
from txl_dist.distributed.recovery.agent import Agent
from txl_dist.distributed.recovery.seat import SEAT, AgentOptions

def start(seat):
    if seat.is_spare and "NO_SPARES" in os.environ:
        raise BlockingIOError("as if there were too many processes")
    return subprocess.Popen([sys.executable, sys.argv[1]], env=os.environ | {SEAT: seat.to_json()})

options = AgentOptions(
    silent_s=float(os.environ.get("SILENT_S", "1")), max_in_row=int(sys.argv[2]), on_loss=sys.argv[3], max_ranks=4,
    run_dir=os.environ.get("FOLDER", "."), spare_nodes=int(os.environ.get("SPARE_NODES", "0")),
    settings_hash=os.environ.get("SETTINGS", ""), plugins=os.environ.get("PLUGINS", ""),
)
agent.FOUND_WITHIN_S = 0.5
agent.REPORT_EVERY_S = float(os.environ.get("REPORT_EVERY_S", agent.REPORT_EVERY_S))
if "UNKILLABLE" in os.environ:
    Agent._signal = lambda self, number: None  # as if the process were inside the kernel
    agent.END_S = agent.KILLED_S = coordinator.KILLED_S = coordinator.REPLACED_S = 0.5
sys.exit(Agent(start, options).run())
"""
RANK = """
import json, os, signal, sys, threading, time
import psutil
from txl_dist.distributed.recovery.agent import connect_to
from txl_dist.distributed.recovery.seat import read_seat
from txl_dist.distributed.recovery.spare import is_spare, serve_replacements
from txl_dist.distributed.recovery.status import StatusPage

if is_spare(os.environ):
    with open(f"{os.environ['FOLDER']}/spares", "a+") as file:
        file.write(f"began {os.getpid()}\\n")
        file.seek(0)
        if len(file.readlines()) <= int(os.environ.get("NUM_BAD_SPARES", "0")):
            os._exit(1)
    serve_replacements()
seat, rank = read_seat(os.environ), int(os.environ["RANK"])
folder = os.environ["FOLDER"]
page = StatusPage(seat.path_of(seat.status))
link = connect_to(seat.address)
link.peer.setblocking(True)
link.send({"kind": "rank", "pid": os.getpid()})
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def note(word):
    with open(f"{folder}/{rank}", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")

def beat():
    while True:
        page.heartbeat(is_waiting=False)
        time.sleep(0.05)
        if os.path.exists(f"{folder}/fail{rank}"):
            link.send({"kind": "failed", "code": 5, "reason": "ValueError: a poison batch"})
            os._exit(5)
        if os.path.exists(f"{folder}/exit{rank}"):
            with open(f"{folder}/exit{rank}") as file:
                os._exit(int(file.read() or 3))
        if os.path.exists(f"{folder}/leave{rank}"):
            with open(f"{folder}/leave{rank}") as file:
                code = int(file.read() or 0)
            link.send({"kind": "leaving", "code": code})
            os._exit(code)

page.progress(step=int(time.time() * 10) % 1000, phase="step")
page.set_limit(60.0)
threading.Thread(target=beat, daemon=True).start()
is_first = os.getppid() == seat.agent
if is_first and rank == 0:
    with open(f"{folder}/address.tmp", "w") as file:
        json.dump(seat.coordinator, file)
    os.rename(f"{folder}/address.tmp", f"{folder}/address")
if is_first:
    while not os.path.exists(f"{folder}/address"):
        time.sleep(0.01)
    with open(f"{folder}/address") as file:
        port, key = json.load(file)
    host = os.environ["COORDINATOR"] if rank else "127.0.0.1"
    link.send({"kind": "coordinator", "host": host, "port": int(port), "key": key})
    link.send({"kind": "stepped", "generation": 1, "step": 1000})
    agent = psutil.Process(seat.agent)
    while not any(each.raddr and each.raddr.port == int(port) for each in agent.net_connections("tcp")):
        time.sleep(0.02)  # until the agent knows the coordinator
    time.sleep(0.2)
    note("began")
while True:
    for message in link.receive():
        if message["kind"] == "plan":
            generation = message["generation"]
            link.send({"kind": "ready", "generation": generation, "port": 5})
        elif message["kind"] == "meet":
            note(f"met {generation}")
            link.send({"kind": "stepped", "generation": generation, "step": 1000})
        elif message["kind"] == "end" and "UNKILLABLE" not in os.environ:
            note(f"ended {message['reason'] or 'without'}")
            link.send({"kind": "leaving", "code": message["code"]})
            os._exit(message["code"])
"""


class Agents:
    """Two agents on this machine, and what their ranks have noted."""

    def __init__(
        self,
        folder: Path,
        *,
        max_in_row: int = 3,
        on_loss: str = "stop",
        num_bad_spares: int = 0,
        silent_s: float = 1.0,
        is_remote: bool = False,
    ) -> None:
        """With `is_remote` the coordinator has another address than the agent of rank 1, as on another node."""
        self.folder = folder
        agent, rank = folder / "agent.py", folder / "rank.py"
        agent.write_text(AGENT, encoding="utf-8")
        rank.write_text(RANK, encoding="utf-8")
        self._words = [sys.executable, str(agent), str(rank), str(max_in_row), on_loss]
        self._faults = {"NUM_BAD_SPARES": str(num_bad_spares), "SILENT_S": str(silent_s)}
        self._faults["COORDINATOR"] = "127.0.0.2" if is_remote else "127.0.0.1"
        self.agents = [self.start(number) for number in range(2)]

    def start(self, number: int) -> subprocess.Popen[str]:
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "FOLDER": str(self.folder)}
        return subprocess.Popen(self._words, env=os.environ | place | self._faults, stderr=subprocess.PIPE, text=True)

    def notes(self, rank: int | str) -> list[str]:
        path = self.folder / str(rank)
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def wait_for(self, word: str, *, rank: int | str, limit_s: float = 60.0) -> int:
        """Wait until a rank has noted a word. Returns the pid of the process that did."""
        end_s = time.monotonic() + limit_s
        while True:
            for line in self.notes(rank):
                if line.startswith(word):
                    return int(line.split()[-1])
            assert time.monotonic() < end_s, f"rank {rank} never noted {word}: {self.notes(rank)}"
            time.sleep(0.02)

    def end(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()


def wait_for_end(process: ProcessId, *, what: str) -> None:
    """Wait until a process has ended."""
    end_s = time.monotonic() + 30
    while process.lives():
        assert time.monotonic() < end_s, f"{what} still runs"
        time.sleep(0.02)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    started = Agents(tmp_path)
    yield started
    started.end()


def test_rank_0_is_replaced_like_any_other_and_twice(agents: Agents) -> None:
    victim, survivor = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(victim, signal.SIGKILL)
    second = agents.wait_for("met 2", rank=0)
    assert agents.wait_for("met 2", rank=1) == survivor
    os.kill(second, signal.SIGKILL)
    assert agents.wait_for("met 3", rank=0) not in (victim, second)
    assert agents.wait_for("met 3", rank=1) == survivor
    assert [agent.poll() for agent in agents.agents] == [None, None]


@pytest.mark.slow
def test_a_stopped_rank_is_killed_and_replaced(agents: Agents) -> None:
    survivor, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(victim, signal.SIGSTOP)
    assert agents.wait_for("met 2", rank=0) == survivor
    assert agents.wait_for("met 2", rank=1) != victim


@pytest.mark.slow
def test_a_spare_that_dies_before_it_is_ready_is_restarted_and_then_replaces_the_rank(tmp_path: Path) -> None:
    agents = Agents(tmp_path, num_bad_spares=1)
    survivor, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(victim, signal.SIGKILL)
    assert agents.wait_for("met 2", rank=0, limit_s=20) == survivor
    assert agents.wait_for("met 2", rank=1) != victim
    assert len(agents.notes("spares")) == 2
    agents.end()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_job_without_room_for_a_spare_works_until_it_needs_one(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_SPARES", "1")
    agents = Agents(tmp_path, silent_s=20.0)
    _, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    if is_lost:
        os.kill(victim, signal.SIGKILL)
    else:
        for rank in (0, 1):
            (tmp_path / f"leave{rank}").touch()
    assert [agent.wait(30) for agent in agents.agents] == [HANG if is_lost else 0] * 2
    error = agents.agents[0].stderr
    assert error is not None
    text = error.read()
    assert ("cannot be replaced, because the spares there have failed" in text) == is_lost
    assert not is_lost or "cannot be started: as if there were too many processes" in text
    agents.end()


@pytest.mark.slow
def test_a_job_that_waits_goes_on_when_the_lost_agent_is_started_again(tmp_path: Path) -> None:
    agents = Agents(tmp_path, on_loss="wait", silent_s=20.0)
    survivor, lost = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    agents.agents[1].kill()
    agents.agents[1].wait()
    agents.agents[1] = agents.start(1)
    assert agents.wait_for("met 3", rank=0) == survivor
    assert agents.wait_for("met 3", rank=1) != lost
    assert [agent.poll() for agent in agents.agents] == [None, None]
    agents.end()


@pytest.mark.slow
@pytest.mark.parametrize(("num_bad_spares", "by_file"), [(0, False), (100, False), (100, True)])
def test_a_job_that_waits_ends_when_it_is_asked_to_stop_also_if_no_rank_is_left(
    num_bad_spares: int, by_file: bool, tmp_path: Path
) -> None:
    agents = Agents(tmp_path, on_loss="wait", num_bad_spares=num_bad_spares, silent_s=20.0)
    first, second = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    if num_bad_spares:
        for victim in (first, second):
            os.kill(victim, signal.SIGKILL)
    else:
        agents.agents[1].kill()
    assert agents.agents[0].stderr is not None
    text = next(line for line in agents.agents[0].stderr if "the job waits for" in line)
    if by_file:
        (tmp_path / STOP).touch()
    else:
        agents.agents[0].send_signal(signal.SIGTERM)
    assert agents.agents[0].wait(30) == HANG, text
    assert not (tmp_path / STOP).exists()
    agents.end()


def test_an_agent_that_looks_rarely_notices_the_end_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPORT_EVERY_S", "600")
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT, encoding="utf-8")
    rank.write_text("import time; time.sleep(1); raise SystemExit(7)", encoding="utf-8")  # it connects to no agent
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "FOLDER": str(tmp_path)}
    words = [sys.executable, str(agent), str(rank), "3", "stop"]
    assert subprocess.run(words, env=os.environ | place, timeout=60, check=False).returncode == 7


def test_an_agent_that_looks_rarely_passes_a_request_to_stop_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPORT_EVERY_S", "600")
    agents = Agents(tmp_path, on_loss="wait", num_bad_spares=100, silent_s=600.0)
    try:
        for victim in [agents.wait_for("began", rank=rank) for rank in (0, 1)]:
            os.kill(victim, signal.SIGKILL)
        assert agents.agents[0].stderr is not None
        text = next(line for line in agents.agents[0].stderr if "the job waits for" in line)
        agents.agents[0].send_signal(signal.SIGTERM)
        assert agents.agents[0].wait(30) == HANG, text
    finally:
        agents.end()


@pytest.mark.slow
def test_an_agent_that_looks_rarely_kills_its_rank_when_it_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPORT_EVERY_S", "600")
    agents = Agents(tmp_path, is_remote=True, silent_s=6.0)
    try:
        _, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
        agents.agents[0].send_signal(signal.SIGSTOP)  # the coordinator is in this process
        wait_for_end(process_id(victim), what="the rank")
    finally:
        agents.end()


@pytest.mark.slow
def test_a_spare_of_other_code_than_the_job_replaces_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUGINS", ", plugin mine 1.0 (123456789abc)")
    agents = Agents(tmp_path, on_loss="shrink", silent_s=20.0)
    survivor, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(victim, signal.SIGKILL)
    assert agents.wait_for("met 3", rank=0) == survivor
    agents.end()
    stderr = agents.agents[0].stderr
    assert stderr is not None
    assert f"the job runs {code_version()}, plugin mine 1.0 (123456789abc), and {code_version()} is" in stderr.read()


@pytest.mark.slow
def test_a_job_whose_spares_fail_continues_with_fewer_ranks(tmp_path: Path) -> None:
    agents = Agents(tmp_path, on_loss="shrink", num_bad_spares=100, silent_s=20.0)
    survivor, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(victim, signal.SIGKILL)
    assert agents.wait_for("met 3", rank=0) == survivor
    assert [agent.poll() for agent in agents.agents] == [None, None]
    agents.end()


@pytest.mark.slow
def test_an_agent_that_is_cut_off_kills_its_rank_and_gets_a_replacement_when_it_is_connected_again(
    tmp_path: Path,
) -> None:
    agents = Agents(tmp_path, is_remote=True, silent_s=5.0)
    survivor, victim = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    agents.agents[0].send_signal(signal.SIGSTOP)  # the coordinator is in this process
    wait_for_end(process_id(victim), what="the rank")
    assert agents.agents[1].poll() is None
    agents.agents[0].send_signal(signal.SIGCONT)
    assert agents.wait_for("met 2", rank=0) == survivor
    assert agents.wait_for("met 2", rank=1) != victim
    agents.end()


@pytest.mark.slow
def test_a_rank_whose_agent_was_refused_by_an_address_of_an_earlier_job_is_not_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        publish_job(tmp_path, JobAddress("127.0.0.2", stranger.getsockname()[1], "a key"))
        threading.Thread(target=refuse, args=(stranger,), daemon=True).start()
        agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
        agent.write_text(AGENT, encoding="utf-8")
        rank.write_text("import time; time.sleep(3)", encoding="utf-8")
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "FOLDER": str(tmp_path), "SILENT_S": "0.3"}
        words = [sys.executable, str(agent), str(rank), "3", "wait"]
        assert subprocess.run(words, env=os.environ | place, timeout=60, check=False).returncode == 0


def join_late(folder: Path, *, settings_hash: str, is_done: bool = False) -> subprocess.CompletedProcess[str]:
    """Start agent 1 beside the job of agent 0, which runs or is done. Return the ended process.

    The settings of the job have the hash "job".
    """
    server = CoordinatorServer(Coordinator(1, silent_s=60.0, max_in_row=3, on_loss="wait"), unreachable_s=600.0)
    first = Connection(socket.create_connection(("127.0.0.1", server.port)))
    place = {"host": "a", "node": "a", "seat": [], "pid": 1, "process": [], "partner": []}
    alike = {"settings_hash": "job", "code": code_version()}
    first.send({"kind": "hello", "key": server.key, "agent": 0, **place, **alike})
    if is_done:
        first.send({"kind": "left", "key": server.key, "agent": 0, "code": 0})
    publish_job(folder, JobAddress("127.0.0.1", server.port, server.key))
    agent = folder / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    variables = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "FOLDER": str(folder), "SETTINGS": settings_hash}
    words = [sys.executable, str(agent), "no rank is started", "3", "wait"]
    done = subprocess.run(words, env=os.environ | variables, timeout=60, capture_output=True, text=True, check=False)
    first.peer.close()
    server.close(grace_s=60.0)
    return done


def test_an_agent_with_other_settings_cannot_join_a_running_job_and_says_so(tmp_path: Path) -> None:
    done = join_late(tmp_path, settings_hash="others")
    assert done.returncode == 2
    assert done.stderr.count("cannot join the job") == 1
    assert (
        f"agent 1 on {socket.gethostname()} cannot join the job: its settings are not those of the job" in done.stderr
    )


def test_an_agent_that_comes_after_the_run_ends_well_and_says_why(tmp_path: Path) -> None:
    done = join_late(tmp_path, settings_hash="job", is_done=True)
    assert done.returncode == 0
    assert f"agent 1 on {socket.gethostname()} cannot join the job: the run is done" in done.stderr


def refuse(listener: socket.socket) -> None:
    """Close each connection as soon as it is made."""
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        peer.close()


def test_an_agent_that_cannot_connect_to_the_coordinator_says_so(tmp_path: Path) -> None:
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT, encoding="utf-8")
    rank.write_text(RANK, encoding="utf-8")
    (tmp_path / "address").write_text('[1, "a key"]', encoding="utf-8")  # nothing listens at port 1
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "FOLDER": str(tmp_path), "COORDINATOR": "127.0.0.1"}
    words = [sys.executable, str(agent), str(rank), "3", "stop"]
    done = subprocess.run(words, env=os.environ | place, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == HANG
    assert "the agent of rank 1 on " in done.stderr
    assert "cannot connect to that of rank 0 at 127.0.0.1:1" in done.stderr


def test_a_spare_node_ends_soon_after_a_job_that_has_ended_before_it_had_begun(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as store:
        place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "SPARE_NODES": "1", "FOLDER": str(tmp_path)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        words = [sys.executable, str(agent), "rank.py", "3", "stop"]
        spare = subprocess.Popen(words, env=os.environ | place, stderr=subprocess.PIPE, text=True)
        peer, _ = store.accept()
    peer.close()
    assert spare.wait(30) == 0
    assert spare.stderr is not None
    assert "the job has ended before it had begun" in spare.stderr.read()


def test_an_agent_has_a_name_with_its_number(tmp_path: Path) -> None:
    options = {"silent_s": 5.0, "max_in_row": 3, "spare_nodes": 1, "run_dir": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as store:
        place = {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        words = [sys.executable, "-m", "txl_dist.distributed.recovery", json.dumps({"words": [], "options": options})]
        agent = subprocess.Popen(words, env=os.environ | place)
        store.accept()
        assert Path(f"/proc/{agent.pid}/comm").read_text(encoding="ascii") == "txl-agent-3\n"
        agent.kill()
        agent.wait(30)


def test_the_end_of_an_agent_ends_the_job_and_all_its_processes(agents: Agents) -> None:
    survivor, other = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    agents.agents[1].kill()
    assert agents.wait_for("ended", rank=0) == survivor
    assert agents.agents[0].wait(30) == 76
    error = agents.agents[0].stderr
    assert error is not None
    assert "the agent of rank 1" in error.read()
    wait_for_end(process_id(other), what="the rank of the lost agent")


def test_an_error_of_a_rank_ends_all_agents_with_its_exit_code(agents: Agents) -> None:
    survivor, _ = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    (agents.folder / "fail1").touch()
    assert agents.wait_for("ended rank 1 on", rank=0) == survivor
    assert [agent.wait(30) for agent in agents.agents] == [5, 5]
    assert "a poison batch" in agents.notes(0)[-1]
    assert not any(line.startswith("met") for rank in (0, 1) for line in agents.notes(rank))


def test_an_agent_whose_rank_cannot_be_ended_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNKILLABLE", "1")
    agents = Agents(tmp_path, silent_s=20.0)
    stuck, _ = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    (tmp_path / "fail1").touch()
    assert agents.agents[0].wait(30) == 5
    error = agents.agents[0].stderr
    assert error is not None
    assert f"SIGKILL does not end pid {stuck}" in error.read()
    agents.end()


@pytest.mark.slow
def test_a_job_shrinks_by_a_rank_that_cannot_be_ended_whose_agent_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNKILLABLE", "1")
    agents = Agents(tmp_path, on_loss="shrink")
    survivor, stuck = (agents.wait_for("began", rank=rank) for rank in (0, 1))
    os.kill(stuck, signal.SIGSTOP)
    assert agents.wait_for("met 3", rank=0) == survivor
    (tmp_path / "leave0").touch()
    assert [agent.wait(30) for agent in agents.agents] == [0, 0]
    os.kill(stuck, signal.SIGKILL)
    agents.end()


@pytest.mark.parametrize("deadline_s", [None, 110.0])
def test_after_a_pause_of_its_node_a_rank_is_killed_at_once_even_if_it_was_asked_to_end(
    deadline_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(Agent, "_signal", lambda self, number: signals.append(number))
    paused = object.__new__(Agent)
    paused._options = AgentOptions(silent_s=6.0, max_in_row=3)
    paused._pid, paused._is_leaving, paused._exit_status, paused._cause = 1, False, None, ""
    paused._lease_s, paused._deadline_s = 90.0, deadline_s
    paused._look_at_lease(95.0)
    assert signals == []
    paused._look_at_lease(100.0)
    assert signals == [signal.SIGKILL]


@pytest.mark.parametrize("is_early", [False, True], ids=["after the plan", "before the plan"])
@pytest.mark.parametrize(("lease_s", "host", "ends"), [(1.0, "", True), (1.0, "another", False), (None, "", False)])
def test_a_sigterm_after_the_loss_of_another_agent_of_the_node_ends_the_node_and_not_the_job(
    lease_s: float | None, host: str, ends: bool, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(Agent, "_signal", lambda self, number: signals.append(number))
    left = object.__new__(Agent)
    left._rank_link, left._stop, left._lease_s, left._pid = None, None, lease_s, 7
    left._node_ends_by_s, left._is_node_ending, left._stop_s = 0.0, False, -math.inf
    left._is_idle, left._is_welcome = False, True
    loss = Loss(3, host or socket.gethostname(), 9, AGENT_LOST, 5, "step", 0.1)
    if is_early:
        left._forward(signal.SIGTERM, None)
    left._follow({"kind": "plan", "rank": 2, "losses": [list(loss)]})
    if not is_early:
        left._forward(signal.SIGTERM, None)
    assert left._is_node_ending == ends
    forwarded = [signal.SIGTERM] if is_early or not ends else []
    assert signals == forwarded + [signal.SIGKILL] * ends


def test_the_exit_code_that_a_replacement_has_announced_counts_if_its_spare_has_ended(agents: Agents) -> None:
    victim = agents.wait_for("began", rank=1)
    os.kill(victim, signal.SIGKILL)
    agents.wait_for("met 2", rank=1)
    os.kill(agents.wait_for("began", rank="spares"), signal.SIGKILL)  # the parent, which alone learns the exit code
    (agents.folder / "leave1.tmp").write_text("75", encoding="ascii")
    (agents.folder / "leave1.tmp").rename(agents.folder / "leave1")
    assert agents.agents[1].wait(30) == 75


def test_a_stopped_replacement_whose_agent_was_killed_does_not_outlive_the_job(agents: Agents) -> None:
    os.kill(agents.wait_for("began", rank=1), signal.SIGKILL)
    replacement = process_id(agents.wait_for("met 2", rank=1))
    os.kill(replacement.pid, signal.SIGSTOP)
    agents.agents[1].kill()
    assert agents.agents[0].wait(30) == HANG
    wait_for_end(replacement, what="the stopped process")


def test_a_replacement_whose_job_and_spare_have_ended_reports_exit_code_76(agents: Agents) -> None:
    os.kill(agents.wait_for("began", rank=1), signal.SIGKILL)
    agents.wait_for("met 2", rank=1)
    agents.agents[0].kill()
    assert agents.agents[1].wait(30) == HANG


def test_a_rank_that_dies_before_the_job_is_complete_is_not_replaced(tmp_path: Path) -> None:
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT, encoding="utf-8")
    rank.write_text("import os; os.kill(os.getpid(), 9)", encoding="utf-8")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    words = [sys.executable, str(agent), str(rank), "3", "stop"]
    ended = subprocess.run(words, env=os.environ | place, check=False, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "died of SIGKILL before all ranks had connected to each other, and is not replaced" in ended.stderr


def test_a_rank_that_ends_in_the_middle_of_a_run_with_exit_code_0_has_failed(agents: Agents) -> None:
    agents.wait_for("began", rank=1)
    (agents.folder / "new").write_text("0", encoding="utf-8")
    (agents.folder / "new").rename(agents.folder / "exit1")
    assert [agent.wait(30) for agent in agents.agents] == [1, 1]
    stderr = agents.agents[1].stderr
    assert stderr is not None
    assert "has ended itself with exit code 0 before the end of the run, and is not replaced" in stderr.read()


def test_a_plugin_that_calls_exit_in_the_middle_of_a_run_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process announces its end, with the exit code of a run without a result, and then ends with 0."""
    agent, _, told = agent_without_process(monkeypatch)
    agent._number = 1
    agent._pid, agent._exit_status = 7, 0
    agent._is_leaving, agent._announced_code = True, 1
    assert agent._look_at_rank(100.0) == 1
    assert told == [{"kind": "left", "code": 1}]
    assert "before the end of the run" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_rank_that_is_killed_after_it_has_announced_its_end_has_ended_as_announced(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    agent, _, told = agent_without_process(monkeypatch)
    agent._pid, agent._exit_status = 7, -number
    agent._is_leaving, agent._announced_code = True, 0
    assert agent._look_at_rank(100.0) == 0
    assert told == [{"kind": "left", "code": 0}]


def test_the_agent_of_a_rank_that_ends_itself_without_a_reason_says_so(agents: Agents) -> None:
    agents.wait_for("began", rank=1)
    (agents.folder / "exit1").touch()
    assert agents.agents[1].wait(30) == 3
    stderr = agents.agents[1].stderr
    assert stderr is not None
    assert "txl: recovery: rank 1 on " in (said := stderr.read())
    assert "has ended itself with exit code 3, and is not replaced" in said


def test_the_exit_code_of_a_rank_is_that_of_its_agent(tmp_path: Path) -> None:
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT, encoding="utf-8")
    for wanted in (0, 2, 75):
        rank.write_text(f"raise SystemExit({wanted})", encoding="utf-8")
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        words = [sys.executable, str(agent), str(rank), "3", "stop"]
        assert subprocess.run(words, env=os.environ | place, check=False).returncode == wanted


def test_signals_reach_the_rank(tmp_path: Path) -> None:
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT, encoding="utf-8")
    rank.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open({json.dumps(str(tmp_path / 'up'))}, 'w').close()\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    started = subprocess.Popen([sys.executable, str(agent), str(rank), "3", "stop"], env=os.environ | place)
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    started.terminate()
    assert started.wait(30) == 75


def agent_without_process(monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, list[int], list[dict[str, object]]]:
    """An agent that has just lost its process. Returns (agent, signals that it has sent, messages that it has sent)."""
    signals: list[int] = []
    told: list[dict[str, object]] = []
    monkeypatch.setattr(Agent, "_signal", lambda self, number: signals.append(number))
    monkeypatch.setattr(Agent, "_tell_coordinator", lambda self, message: told.append(message))
    agent = object.__new__(Agent)
    agent._options = AgentOptions(silent_s=6.0, max_in_row=3)
    agent._rank_link = agent._child = agent._lease_s = agent._deadline_s = agent._server = None
    agent._stop, agent._plan, agent._told_stop = None, None, ""
    agent._is_leaving, agent._is_idle, agent._is_welcome = False, False, True
    agent._page = StatusPage(os.memfd_create("status"))
    agent._spare = SpareProcess(lambda: pytest.fail("no spare is needed"))
    agent._node_ends_by_s = agent._announced_code = 0
    agent._has_joined = True
    agent._coordinator = object()  # type: ignore[assignment]
    agent._forget_process()
    return agent, signals, told


def test_an_agent_that_lost_its_rank_while_it_was_cut_off_kills_a_later_rank_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, signals, _ = agent_without_process(monkeypatch)
    for generation in (2, 3):
        agent._pid, agent._lease_s = 7, 90.0
        agent._look_at_lease(100.0)
        assert signals.pop() == signal.SIGKILL
        agent._follow({"kind": "plan", "generation": generation, "rank": -1, "losses": []})
        signals.clear()


def test_a_replacement_that_died_before_it_connected_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _, told = agent_without_process(monkeypatch)
    connection: Any = object()
    agent._act(connection, {"kind": "forked", "pid": 7})
    agent._act(connection, {"kind": "exited", "pid": 7, "status": -signal.SIGKILL})
    assert agent._look_at_rank(0.0) is None
    late_s = time.monotonic() + BEGIN_S + 1  # the next spare still imports
    agent._look_at_spare(late_s)
    for seconds in (0.0, CAUSE_S + 1):
        assert agent._look_at_rank(late_s + seconds) is None
    assert [message["kind"] for message in told] == ["died"]


def test_a_stop_signal_at_an_agent_without_a_rank_reaches_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _, told = agent_without_process(monkeypatch)
    agent._is_idle = True
    agent._forward(signal.SIGTERM, None)
    for _ in range(2):
        agent._look_at_stop(0.0)
    assert told == [{"kind": "stop", "reason": "SIGTERM", "withdrawn": ""}]


def test_a_stop_file_that_is_removed_again_is_withdrawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agent, _, told = agent_without_process(monkeypatch)
    agent._server, agent._next_look_s, agent._stop_file = object(), 0.0, None  # type: ignore[assignment]
    agent._options = agent._options._replace(run_dir=str(tmp_path))
    file = tmp_path / STOP
    file.touch()
    agent._look_at_stop(10.0)
    agent._pid = 7  # a replacement has come
    file.unlink()
    agent._look_at_stop(20.0)
    agent._look_at_stop(30.0)
    assert told == [
        {"kind": "stop", "reason": f"the file {file}", "withdrawn": ""},
        {"kind": "stop", "reason": "", "withdrawn": f"the file {file}"},
    ]
    assert agent._stop_file is None


def test_a_stop_signal_at_another_agent_reaches_the_rank_also_if_its_process_is_being_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, signals, _ = agent_without_process(monkeypatch)
    agent._follow({"kind": "stop"})
    agent._pid = 7
    signals.clear()
    agent._forward_again()
    assert signals == [signal.SIGTERM]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_replacement_has_the_settings_of_the_start_even_if_the_file_was_changed_since(
    is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[optim]\nlr = 0.125\n", encoding="utf-8")
    for name, value in _config_copy(["train", str(file), "--run.seed", "7"]).items():
        monkeypatch.setenv(name, value)
    if is_gone:
        file.unlink()
    else:
        file.write_text("[optim]\nlr = 0.25\n", encoding="utf-8")
    settings = _train_arguments([str(file), "--run.seed", "7"]).settings
    assert (settings.optim.lr, settings.run.seed) == (0.125, 7)
    assert CONFIG_COPY not in os.environ  # commands that a plugin starts read their own files


def test_a_job_without_a_configuration_file_has_no_copy() -> None:
    assert _config_copy(["train", "--run.seed", "7"]) == {}
    assert _config_copy(["train"]) == {}
