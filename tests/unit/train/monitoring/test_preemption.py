"""Every kind of stop request is noticed and named, and none ends the process by itself."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from txl_dist.distributed.processes import process_age_s, process_id
from txl_dist.errors import ConfigError
from txl_dist.train.monitoring import preemption as stopping
from txl_dist.train.monitoring.preemption import PreemptionRequests, parse_duration


@pytest.fixture
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "POLL_EVERY_S", 0.0)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_the_first_signal_is_the_reason_and_repeats_change_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    requests = PreemptionRequests()
    try:
        assert requests.reason == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.reason == number.name
        assert requests.reason == number.name
    finally:
        requests.close()
    assert signal.getsignal(number) == before


BUSY = """
import hashlib, sys
from txl_dist.console.logging import start_logging
from txl_dist.train.monitoring.preemption import PreemptionRequests
start_logging()
requests = PreemptionRequests()
print("ready", file=sys.stderr, flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000_000)  # one operation of some seconds, as a large step is
print("the operation has ended", file=sys.stderr, flush=True)
print(requests.reason, file=sys.stderr, flush=True)
requests.close()
"""


@pytest.mark.slow
def test_a_signal_is_acknowledged_while_the_main_thread_is_in_one_long_operation() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    lines = [line.split(" I ")[-1].strip() for line in process.stderr]
    assert process.wait() == 0
    assert lines == [
        "asked to stop by SIGTERM: the run saves after the current step, then exits",
        "SIGTERM again: the run is already stopping",
        "the operation has ended",
        "SIGTERM",
    ]


def test_closing_gives_back_who_was_woken_by_signals_before() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    PreemptionRequests().close()
    assert signal.set_wakeup_fd(before) == before


@pytest.mark.usefixtures("look_always")
def test_the_stop_file_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    requests = PreemptionRequests(stop_file=file)
    try:
        assert requests.reason == ""
        file.touch()
        assert requests.reason == f"the file {file}"
        requests.clear()
        assert not file.exists()
        requests.clear()
    finally:
        requests.close()


@pytest.mark.usefixtures("look_always")
def test_a_process_that_becomes_rank_0_later_watches_the_stop_file(tmp_path: Path) -> None:
    file = tmp_path / "STOP"
    file.touch()
    requests = PreemptionRequests()
    try:
        assert requests.reason == ""
        requests.watch(stop_file=file, max_time_s=0.0)
        assert requests.reason == f"the file {file}"
    finally:
        requests.close()


@pytest.mark.usefixtures("look_always")
def test_the_loss_of_the_run_directory_is_a_reason_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    requests = PreemptionRequests(stop_file=tmp_path / "run" / "STOP")
    try:
        assert requests.reason == ""
        (tmp_path / "run").rename(tmp_path / "away")
        assert requests.reason == f"the loss of the run directory {tmp_path / 'run'}"
    finally:
        requests.close()


@pytest.mark.usefixtures("look_always")
def test_each_signal_and_each_other_reason_counts_so_that_who_waits_is_asked_again(tmp_path: Path) -> None:
    requests = PreemptionRequests(stop_file=tmp_path / "STOP")
    try:
        assert requests.count == 0
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests.count == count
        (tmp_path / "STOP").touch()
        assert (requests.count, requests.count) == (3, 3)
        assert requests.reason == "SIGTERM"
    finally:
        requests.close()


def test_the_disk_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now_s[0])
    requests = PreemptionRequests(stop_file=tmp_path / "STOP")
    try:
        assert requests.reason == ""
        (tmp_path / "STOP").touch()
        now_s[0] += 0.9
        assert requests.reason == ""
        now_s[0] += 0.2
        assert "STOP" in requests.reason
    finally:
        requests.close()


def test_the_time_limit_of_a_replacement_counts_from_the_start_of_its_agent() -> None:
    with subprocess.Popen(["sleep", "60"]) as agent:  # younger than this process, where a real one is older
        requests = PreemptionRequests(max_time_s=process_age_s() / 2, first_pid=agent.pid)
        try:
            assert requests.reason == ""
        finally:
            requests.close()
            agent.kill()


def test_a_signal_to_a_fresh_replacement_waits_until_it_can_save() -> None:
    program = """
import os, signal, socket, time
from txl_dist.distributed.connection import Connection
from txl_dist.distributed.recovery import spare
from txl_dist.distributed.recovery.agent import SIGNALS
from txl_dist.distributed.recovery.seat import Seat
from txl_dist.train.monitoring.preemption import PreemptionRequests

for number in SIGNALS:
    signal.signal(number, signal.SIG_IGN)
spare.connect_to = lambda address: Connection(socket.socketpair()[0])
parents = {}
if spare._fork(Seat("", 0, 0, [], [], {}), parents):
    time.sleep(0.3)  # joins its agent
    requests = PreemptionRequests(first_pid=os.getppid())
    print(requests.reason, flush=True)
    os._exit(75)
(pid,) = parents
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split("\n")[:2] == ["SIGTERM", "75 set()"]


def test_the_time_limit_counts_from_the_start_of_the_process() -> None:
    requests = PreemptionRequests(max_time_s=0.001)  # this process is older than that
    try:
        assert requests.reason == "the time limit of 0.001 s"
    finally:
        requests.close()
    requests = PreemptionRequests(max_time_s=3600 * 24)
    try:
        assert requests.reason == ""
    finally:
        requests.close()


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[-1]])
time.sleep(60)
"""
RANK = """
import pathlib, sys, time
from txl_dist.train.monitoring import preemption as stopping
requests = stopping.PreemptionRequests()
pathlib.Path("ready").touch()
end_s = time.monotonic() + 30
while not requests.reason and time.monotonic() < end_s:
    time.sleep(0.05)
pathlib.Path("reason.tmp").write_text(requests.reason)
pathlib.Path("reason.tmp").rename("reason")
"""


def start_under(launcher: str, folder: Path) -> subprocess.Popen[bytes]:
    (folder / launcher).write_text(textwrap.dedent(LAUNCHER), encoding="utf-8")
    command = [sys.executable, str(folder / launcher), RANK.replace("end_s = time.monotonic() + 30", END[launcher])]
    process = subprocess.Popen(command, cwd=folder)
    wait_for(folder / "ready")
    return process


END = {"deepspeed": "end_s = time.monotonic() + 30", "shell": "end_s = time.monotonic() + 3"}


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_the_end_of_the_launcher_is_a_request(tmp_path: Path) -> None:
    process = start_under("deepspeed", tmp_path)
    process.kill()
    process.wait()
    wait_for(tmp_path / "reason")
    assert (tmp_path / "reason").read_text() == "the end of the launcher"


@pytest.mark.slow
def test_the_end_of_a_shell_is_none(tmp_path: Path) -> None:
    process = start_under("shell", tmp_path)
    process.kill()
    process.wait()
    wait_for(tmp_path / "reason")
    assert (tmp_path / "reason").read_text() == ""


AGENT, REPLACEMENT = 50, 60


@pytest.mark.parametrize(
    ("parent_of_agent", "first", "is_request"),
    [(1, "init", True), (1, "python torchrun", False), (40, "init", False)],
    ids=["the launcher is gone", "the launcher is the first process", "the launcher lives"],
)
def test_a_replacement_looks_for_the_launcher_of_its_agent(
    monkeypatch: pytest.MonkeyPatch, parent_of_agent: int, first: str, is_request: bool
) -> None:
    """Its own parent was a spare, which may have ended. In a container the launcher may be process 1."""
    commands = {40: ["python", "torchrun"], 1: first.split()}
    parents = {AGENT: parent_of_agent, 40: 1, os.getpid(): 1 if is_request is False else AGENT}
    monkeypatch.setattr(stopping, "parent_of", lambda pid: parents.get(pid, 0))
    monkeypatch.setattr(stopping, "command_of", lambda pid: commands.get(pid, []))
    monkeypatch.setattr(stopping, "process_id", lambda pid=0: SimpleNamespace(lives=lambda: True))
    monkeypatch.setenv("CROSS_RANK", "0")
    requests = PreemptionRequests(first_pid=AGENT)
    try:
        assert (requests.reason == "the end of the launcher") is is_request
    finally:
        requests.close()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /v/bin/deepspeed --num_gpus 2 x.py", True),
        ("python -u -m deepspeed.launcher.launch --world_info=x --module txl_dist train", True),
        ("python /v/bin/torchrun --nproc-per-node 2 x.py", True),
        ("bash -c deepspeed", False),
        ("python -m txl_dist train deepspeed", False),
        ("", False),
    ],
)
def test_launchers_are_known_by_their_program(command: str, expected: bool) -> None:
    assert stopping._is_launcher(command.split()) is expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("2h30m", 9000), ("1:30:00", 5400), ("1d", 86400), ("36:00:00", 129600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:30", "1:90:00", "-5", "5x", "30m2h", "0", "0s", "0m", "0:00:00"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


def test_a_reused_pid_is_another_process() -> None:
    me = process_id()
    assert me.lives() is True
    assert me._replace(start_ticks=me.start_ticks - 1).lives() is False
    assert me._replace(host="elsewhere").lives() is None
